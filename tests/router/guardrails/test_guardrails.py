"""Guardrails pass, replace and refuse what is asked and answered; what was not checked is not served."""

import asyncio
import json
from typing import Any

import pytest

from baton.errors import ConfigError
from router.guardrails.chain import GuardChain
from router.guardrails.load import load_guardrails
from router.guardrails.ports import Guardrail, GuardrailInput, OutputGuard, Pass, Refuse, Replace
from tests.router.served import Served, serve


class Censor:
    """Refuses `forbidden`, replaces `secret`, in both directions; output is held back to its end of word."""

    def __init__(self) -> None:
        self.asked: list[GuardrailInput] = []

    async def check_input(self, asked: GuardrailInput) -> Pass | Replace | Refuse:
        self.asked.append(asked)
        if any("forbidden" in text.text for text in asked.texts):
            return Refuse(message="Not here.")
        if any("secret" in text.text for text in asked.texts):
            return Replace(texts=tuple(t.text.replace("secret", "[gone]") for t in asked.texts))
        return Pass()

    def watch_output(self, asked: GuardrailInput) -> OutputGuard | None:
        return _Watch()


class _Watch:
    def __init__(self) -> None:
        self._held = ""

    async def piece(self, text: str, *, last: bool) -> str | Refuse:
        self._held += text
        if "forbidden" in self._held:
            return Refuse(message="Not to be told.")
        if not last and not self._held.endswith(" "):
            return ""
        shown, self._held = self._held.replace("secret", "[gone]"), ""
        return shown


class Bracketer(Censor):
    """Puts each `a` that is answered into brackets."""

    def watch_output(self, asked: GuardrailInput) -> OutputGuard | None:
        return self

    async def piece(self, text: str, *, last: bool) -> str | Refuse:
        return text.replace("a", "[a]")


class Broken:
    """Fails."""

    async def check_input(self, asked: GuardrailInput) -> Pass | Replace | Refuse:
        raise RuntimeError(f"could not check {asked.texts}")

    def watch_output(self, asked: GuardrailInput) -> OutputGuard | None:
        return None


def _said(content: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "be good"}, {"role": "user", "content": content}]


def _streamed(text: str) -> tuple[str, list[dict[str, Any]]]:
    """What a stream showed, and its errors."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    deltas = [c["delta"].get("content", "") for e in events for c in e.get("choices", ())]
    return "".join(deltas), [e["error"] for e in events if "error" in e]


def _prompt(served: Served) -> str:
    tokens = served.generator.requests[-1].prompt.prompt_tokens
    return served.tokenizer.backend.decode(list(tokens), skip_special_tokens=False)


def with_guard(guard: Guardrail) -> dict[str, Any]:
    return {"guards": GuardChain([guard], timeout_s=5.0)}


async def test_what_is_in_order_passes_unchanged():
    async with serve(parts=with_guard(Censor())) as served:
        served.says("all is well")
        reply = await served.chat(messages=_said("hello"))
        assert reply.json()["choices"][0]["message"]["content"] == "all is well"
        text, errors = _streamed((await served.chat(messages=_said("hello"), stream=True)).text)
        assert (text, errors) == ("all is well", [])


async def test_a_guardrail_knows_who_asks_what_of_which_model():
    guard = Censor()
    async with serve(parts=with_guard(guard)) as served:
        await served.chat(messages=_said("hello"))
        (asked,) = guard.asked
        assert (asked.tenant_id, asked.model) == ("anonymous", "tiny")
        assert [(t.role, t.text) for t in asked.texts] == [("system", "be good"), ("user", "hello")]


async def test_the_best_of_several_is_the_likeliest_whatever_is_replaced_of_it():
    """Its tokens' log-probabilities are not shown then, and count all the same."""
    async with serve(parts=with_guard(Censor())) as served:
        served.says("a secret", "all is well")
        unlikely = served.generator.script[0][-1]
        served.generator.logprob_of = {unlikely: -50.0}
        reply = await served.complete(prompt="hello", n=1, best_of=2)
        assert [choice["text"] for choice in reply.json()["choices"]] == ["all is well"]
        served.generator.logprob_of = {served.generator.script[1][-1]: -50.0}
        reply = await served.complete(prompt="hello", n=1, best_of=2)
        assert [choice["text"] for choice in reply.json()["choices"]] == ["a [gone]"]


async def test_what_is_asked_can_be_refused_before_any_work():
    async with serve(parts=with_guard(Censor())) as served:
        for reply in (
            await served.chat(messages=_said("a forbidden thing")),
            await served.complete(prompt="a forbidden thing"),
            await served.complete(prompt=served.tokenizer.backend.encode("forbidden").ids),
        ):
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (400, "content_refused")
            assert error["message"] == "Not here."
            assert error["param"] in ("messages", "prompt")
        assert served.generator.requests == []


@pytest.mark.parametrize("word", ["forbidden", "secret"])
@pytest.mark.parametrize("field", ["tools", "arguments", "effort", "name", "call_id"])
async def test_what_the_template_is_given_besides_messages_is_checked_too(field: str, word: str):
    tool = {"type": "function", "function": {"name": "now", "description": f"of {word} things"}}
    named = {"role": "user", "content": "hi", "name": f"of {word} things"}
    asked: dict[str, Any] = {
        "tools": {"tools": [tool]},
        "arguments": {"chat_template_kwargs": {"style": [f"of {word} things"]}},
        "effort": {"reasoning_effort": word},
        "name": {"messages": [named]},
        "call_id": {"messages": [named | {"name": "n", "tool_call_id": f"of {word} things"}]},
    }
    guard = Censor()
    async with serve(parts=with_guard(guard), tool_call_parser="hermes") as served:
        error = (await served.chat(**asked[field])).json()["error"]
        assert (error["code"], error["param"]) == ("content_refused", "messages")
        assert served.generator.requests == []
        fine = json.loads(json.dumps(asked[field]).replace(word, "other"))
        assert (await served.chat(**fine)).status_code == 200
        assert guard.asked[-1].texts[-1].text == "hi"


async def test_what_is_asked_can_be_replaced():
    async with serve(parts=with_guard(Censor())) as served:
        await served.chat(messages=_said("my secret word"))
        assert "my [gone] word" in _prompt(served)
        await served.complete(prompt="my secret word")
        assert _prompt(served) == "my [gone] word"
        ids = served.tokenizer.backend.encode("my secret word", add_special_tokens=False).ids
        await served.complete(prompt=ids)
        assert _prompt(served) == "my [gone] word"


async def test_token_ids_that_pass_stay_exactly_what_they_are():
    async with serve(parts=with_guard(Censor())) as served:
        await served.complete(prompt=[5, 6, 7])
        assert served.generator.requests[0].prompt.prompt_tokens == (5, 6, 7)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_answered_can_be_replaced_piece_by_piece(stream: bool):
    async with serve(parts=with_guard(Censor())) as served:
        served.says("the secret is out")
        reply = await served.chat(stream=stream, return_token_ids=True, logprobs=True)
        assert "secret" not in reply.text
        if stream:
            assert _streamed(reply.text)[0] == "the [gone] is out"
        else:
            assert reply.json()["choices"][0]["message"]["content"] == "the [gone] is out"


async def test_tokens_behind_what_was_replaced_begin_where_they_are_shown():
    async with serve(parts=with_guard(Bracketer())) as served:
        served.says("a b a c d")
        (choice,) = (await served.complete(logprobs=1)).json()["choices"]
        assert choice["text"] == "[a] b [a] c d"
        told = choice["logprobs"]
        *tokens, end = zip(told["tokens"], told["text_offset"], strict=True)
        assert tokens
        assert all(choice["text"].startswith(token, place) for token, place in tokens)
        assert end == ("<|end|>", len(choice["text"]))


async def test_what_is_answered_can_be_refused():
    async with serve(parts=with_guard(Censor())) as served:
        served.says("it is forbidden to say")
        whole = await served.chat()
        assert (whole.status_code, whole.json()["error"]["code"]) == (400, "content_refused")
        text, errors = _streamed((await served.chat(stream=True)).text)
        assert "forbidden" not in text
        assert [error["code"] for error in errors] == ["content_refused"]
        assert served.generator.in_flight() == 0


async def test_a_guardrail_that_fails_lets_nothing_past_and_tells_nothing(caplog):
    async with serve(parts=with_guard(Broken())) as served:
        reply = await served.chat(messages=_said("private words"))
        assert reply.status_code == 503
        assert served.generator.requests == []
    assert "private words" not in reply.text + caplog.text
    assert "a guardrail failed" in caplog.text


async def test_a_guardrail_that_does_not_answer_in_time_lets_nothing_past():
    class Silent(Broken):
        async def check_input(self, asked: GuardrailInput) -> Pass | Replace | Refuse:
            await asyncio.Event().wait()
            return Pass()

    async with serve(parts={"guards": GuardChain([Silent()], timeout_s=0.01)}) as served:
        assert (await served.chat()).status_code == 503


NO_VERDICTS: list[Any] = [None, False, "refuse", Refuse, {"refuse": True}]
NO_TEXTS: list[Any] = [None, 3, b"fine", "\ud800", Pass()]


@pytest.mark.parametrize(
    "verdict",
    [
        *NO_VERDICTS,
        *(Replace(texts=("be good", text)) for text in NO_TEXTS),
        Replace(texts=None),  # type: ignore[arg-type]
        Replace(texts="ab"),  # type: ignore[arg-type]
        Refuse(message=None),  # type: ignore[arg-type]
    ],
    ids=repr,
)
async def test_what_is_no_verdict_lets_nothing_past(verdict: Any, caplog):
    class Odd(Broken):
        async def check_input(self, asked: GuardrailInput) -> Any:
            return verdict

    async with serve(parts=with_guard(Odd())) as served:
        reply = await served.chat(messages=_said("private words"))
        assert reply.status_code == 503
        assert served.generator.requests == []
    assert "a guardrail gave no verdict" in caplog.text
    assert "private words" not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shown", [*NO_TEXTS, Refuse(message=None)], ids=repr)  # type: ignore[arg-type]
async def test_what_is_no_text_is_not_shown(shown: Any, stream: bool, caplog):
    class Odd(Censor):
        def watch_output(self, asked: GuardrailInput) -> OutputGuard | None:
            return self

        async def piece(self, text: str, *, last: bool) -> Any:
            return shown

    async with serve(parts=with_guard(Odd())) as served:
        served.says("all is well")
        assert (await served.chat(stream=stream)).status_code == 503
        assert served.generator.in_flight() == 0
    assert "a guardrail gave no verdict" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("method", ["check_input", "watch_output"])
async def test_what_fails_before_there_is_anything_to_await_tells_nothing(
    method: str, stream: bool, caplog
):
    class Odd(Censor):
        pass

    def fail(self: Odd, asked: GuardrailInput) -> None:
        raise RuntimeError(f"could not check {asked.texts}")

    setattr(Odd, method, fail)
    async with serve(parts=with_guard(Odd())) as served:
        served.says("all is well")
        reply = await served.chat(messages=_said("private words"), stream=stream)
        assert reply.status_code == 503
    assert "a guardrail failed" in caplog.text
    assert "private words" not in reply.text + caplog.text


async def test_one_guardrail_sees_what_the_one_before_it_put_there():
    first, second = Censor(), Censor()
    async with serve(parts={"guards": GuardChain([first, second])}) as served:
        await served.chat(messages=_said("secret"))
        assert [asked.texts[-1].text for asked in second.asked] == ["[gone]"]


def test_guardrails_are_loaded_by_their_names():
    (guard,) = load_guardrails([f"{__name__}:Censor"])
    assert isinstance(guard, Censor)


@pytest.mark.parametrize(
    "name", ["no.such.module:X", f"{__name__}:Missing", "no-such-entry-point", "json:JSONDecoder"]
)
def test_a_name_that_is_no_guardrail_is_the_operators_mistake(name: str):
    with pytest.raises(ConfigError, match=r"router\.guardrails"):
        load_guardrails([name])
