"""`examples/guardrail.py`, loaded as an operator's router loads it: by name, from the Python path."""

import json
from pathlib import Path

import pytest

from router.guardrails.chain import GuardChain
from router.guardrails.load import load_guardrails
from tests.router.served import Served, serve

EXAMPLES = Path(__file__).parents[2] / "examples"
ADDRESS = "ada@example.org"


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> GuardChain:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return GuardChain(load_guardrails(["guardrail:RedactAddresses"]), timeout_s=5.0)


async def streamed(served: Served) -> str:
    reply = await served.chat(stream=True)
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def test_the_model_sees_no_address(guards: GuardChain):
    async with serve(parts={"guards": guards}) as served:
        await served.chat(messages=[{"role": "user", "content": f"write to {ADDRESS}, please"}])
        tokens = list(served.generator.requests[-1].prompt.prompt_tokens)
        prompt = served.tokenizer.backend.decode(tokens, skip_special_tokens=False)
        assert "write to [address], please" in prompt


async def test_the_client_sees_no_address_however_it_is_cut_into_pieces(guards: GuardChain):
    async with serve(parts={"guards": guards}) as served:
        served.says(f"Write to {ADDRESS} or to nobody.")
        expected = "Write to [address] or to nobody."
        assert await streamed(served) == expected
        reply = await served.chat()
        assert reply.json()["choices"][0]["message"]["content"] == expected


async def test_what_holds_no_address_is_not_changed(guards: GuardChain):
    async with serve(parts={"guards": guards}) as served:
        served.says("at @ home,\nall is well")
        assert await streamed(served) == "at @ home,\nall is well"


async def test_a_word_without_an_end_is_refused(guards: GuardChain):
    async with serve(parts={"guards": guards}) as served:
        served.says("x" * 1000)
        reply = await served.chat()
        assert reply.json()["error"]["code"] == "content_refused"
