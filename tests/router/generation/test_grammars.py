"""The form of an answer: every field that asks for one becomes a grammar,
and what cannot be held to is refused by name and path.
"""

import asyncio
import json
import threading
from collections.abc import Iterable
from typing import Any

import httpx
import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer

from baton.clock import ManualClock
from baton.config.rules import MAX_GRAMMAR_BYTES
from baton.config.schema import GrammarConfig
from baton.errors import InvalidRequestError, OverloadedError, RateLimitedError
from baton.telemetry.metrics import new_registry
from router.anthropic.replies import AnthropicErrorReply
from router.generation import grammars
from router.generation.answer_form import (
    CALL_SCHEMA,
    AnswerForm,
    Grammar,
    StructuralTag,
    grammar_of,
)
from router.generation.grammars import GrammarChecker, _Tenant
from router.http.errors import ErrorReply
from tests.router.generation.random_answers import random_answer
from tests.router.generation.schemas import INVALID, REFUSED, SCHEMAS
from tests.router.served import MODEL, serve, tiny_tokenizer
from tests.waits import WAIT_S, soon

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
RESPONSE, MESSAGE = "/v1/responses", "/v1/messages"
SAID = [{"role": "user", "content": "hi"}]
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": SAID},
    COMPLETION: {"model": MODEL, "prompt": "hi"},
    RESPONSE: {"model": MODEL, "input": "hi"},
    MESSAGE: {"model": MODEL, "messages": SAID, "max_tokens": 50},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f="],
}
OF_OPENAI = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}


def of(kind: Any, value: Any) -> AnswerForm:
    return AnswerForm(kind=kind, value=value, param="field")


@pytest.fixture(scope="module")
def tokenizer():
    made = tiny_tokenizer()
    yield made
    made.close()


@pytest.fixture
def checker():
    made = GrammarChecker(GrammarConfig(max_depth=4), (), new_registry())
    yield made
    made.close()


@pytest.fixture(scope="module")
def vocabulary(tokenizer) -> LLTokenizer:
    (end,) = [i for i in tokenizer.special_ids if tokenizer.backend.id_to_token(i) == "<|end|>"]
    return LLTokenizer(tokenizer.backend.to_str(), eos_token=end)


def takes(vocabulary: LLTokenizer, form: AnswerForm, text: str) -> bool:
    """Whether `text` is a whole answer of that form."""
    matcher = LLMatcher(vocabulary, grammar_of(form, ()).text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = vocabulary.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (of("json", SCHEMA), ['{"a": 1}', '{\n  "a": -3, "b": []}'], ["{}", '{"a":"1"}', "1"]),
        (of("json", json.dumps(SCHEMA)), ['{"a":1}'], ["{}"]),
        (of("regex", "^[ab]+c?$"), ["ab", "aac"], ["", "c", "abcc"]),
        (of("choice", ["yes", 'n"o\\\n', "Zürich"]), ["yes", 'n"o\\\n', "Zürich"], ["no", "ye"]),
        (of("grammar", 'start: "x" N\nN: /[0-9]+/'), ["x12"], ["x", "12"]),
        (of("grammar", 'root ::= "x" [0-9]+'), ["x12"], ["x", "12"]),
        (
            of("structural_tag", StructuralTag.model_validate(TAG)),
            ['so <f=a>{"a":1}</f>.', "no"],
            ["<f=b>"],
        ),
        (of("structural_tag", json.dumps(TAG)), ["so"], ["<f=a>{}</f>"]),
    ],
    ids=lambda value: value.kind if isinstance(value, AnswerForm) else None,
)
def test_a_form_takes_what_follows_it_and_nothing_else(vocabulary, form, right, wrong):
    assert [text for text in right if not takes(vocabulary, form, text)] == []
    assert [text for text in wrong if takes(vocabulary, form, text)] == []


def test_between_the_parts_of_json_there_is_not_endless_space(vocabulary):
    assert takes(vocabulary, of("json", SCHEMA), '{"a":' + " " * 32 + "1}")
    assert not takes(vocabulary, of("json", SCHEMA), '{"a":' + " " * 33 + "1}")


@pytest.mark.parametrize("name", SCHEMAS)
async def test_every_answer_that_ends_follows_its_schema(name, checker, vocabulary):
    grammar = await checker.text_of(of("json", SCHEMAS[name]), "tenant")
    _check_answers(vocabulary, SCHEMAS[name], grammar, seeds=4)


def _check_answers(vocabulary: LLTokenizer, schema: Any, grammar: str, *, seeds: int) -> None:
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    answers = [random_answer(vocabulary, grammar, seed, 250) for seed in range(seeds)]
    assert any(answer is not None for answer in answers)
    for answer in answers:
        if answer is not None:
            validator.validate(json.loads(answer))


@pytest.mark.slow
@pytest.mark.parametrize("outer", ["list", "field", "choice", "named", "reference"])
@pytest.mark.parametrize("name", SCHEMAS)
async def test_schemas_within_schemas(name, outer, vocabulary):
    inner = SCHEMAS[name]
    if "#" in json.dumps(inner) and outer != "reference":
        pytest.skip("its references are to its own root")
    schema = {
        "list": {"type": "array", "items": inner, "maxItems": 2},
        "field": {"type": "object", "properties": {"f": inner}, "required": ["f"]},
        "choice": {"anyOf": [{"const": "neither"}, inner]},
        "named": {"type": "object", "additionalProperties": inner, "maxProperties": 2},
        "reference": inner,
    }[outer]
    checker = GrammarChecker(GrammarConfig(), (), new_registry())
    grammar = await checker.text_of(of("json", schema), "tenant")
    checker.close()
    _check_answers(vocabulary, schema, grammar, seeds=20)


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_not_enforced_is_refused_by_the_path_of_its_keyword(name, checker):
    schema, path = REFUSED[name]
    with pytest.raises(InvalidRequestError) as caught:
        await checker.text_of(of("json", schema), "tenant")
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "field")
    assert caught.value.message.startswith(f"field{path}: ")


@pytest.mark.parametrize("name", INVALID)
async def test_what_is_no_schema_is_refused_by_the_path_of_the_fault(name, checker):
    schema, path = INVALID[name]
    with pytest.raises(InvalidRequestError) as caught:
        await checker.text_of(of("json", schema), "tenant")
    assert (caught.value.code, caught.value.param) == ("invalid_request", "field")
    assert caught.value.message.startswith(f"field{path}")


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (of("regex", "a(?=b)"), "look-around"),
        (of("regex", "a("), "regex"),
        (of("regex", "x" * 70_000), "grammar.max_bytes"),
        (of("json", {"enum": ["x" * 40_000, "y" * 40_000]}), "grammar.max_bytes"),
        (of("json", "{"), "not JSON"),
        (of("json", "[]"), "schema"),
        (of("grammar", "start: nothing"), "nothing"),
        (of("grammar", 'start: %json {"not": {}}'), ".%json 1.not: "),
        (of("structural_tag", '{"structures": []}'), "structures"),
    ],
    ids=lambda value: (
        f"{value.kind} {str(value.value)[:20]}" if isinstance(value, AnswerForm) else None
    ),
)
async def test_a_grammar_that_cannot_be_is_refused(form, said, checker):
    with pytest.raises(InvalidRequestError) as caught:
        await checker.text_of(form, "tenant")
    assert caught.value.param == "field"
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (GrammarConfig(max_symbols=9), "grammar size"),
        (GrammarConfig(compile_fuel=300), "initial lexer configuration"),
    ],
)
async def test_a_grammar_that_takes_too_much_work_is_refused_by_its_field(limits, said, checker):
    field = {"type": "string", "maxLength": 9, "pattern": "^(a|b)*a(a|b){9}$"}
    form = of("json", {"properties": {f"p{i}": field | {"minLength": i} for i in range(9)}})
    assert await checker.text_of(form, "tenant")
    narrow = GrammarChecker(limits, (), new_registry())
    with pytest.raises(InvalidRequestError, match=f"^field: {said}.*too big") as caught:
        await narrow.text_of(form, "tenant")
    narrow.close()
    assert caught.value.param == "field"


async def test_a_grammar_is_checked_once():
    registry = new_registry()
    checker = GrammarChecker(GrammarConfig(), (), registry)
    for _ in range(3):
        await checker.text_of(of("json", SCHEMA), "tenant")
    with pytest.raises(InvalidRequestError):
        await checker.text_of(of("regex", "("), "tenant")
    counted = {
        outcome: registry.get_sample_value("baton_router_grammars_total", {"outcome": outcome})
        for outcome in ("checked", "known", "refused")
    }
    assert counted == {"checked": 1, "known": 2, "refused": 1}
    checker.close()


async def test_a_tenant_has_a_number_of_grammars_checked_at_a_time():
    checker = GrammarChecker(GrammarConfig(max_compiling_per_tenant=0), (), new_registry())
    with pytest.raises(OverloadedError):
        await checker.text_of(of("json", SCHEMA), "tenant")
    assert await checker.text_of(None, "tenant") == ""
    checker.close()


@pytest.mark.parametrize(
    ("path", "fields", "form"),
    [
        (CHAT, {"response_format": {"type": "json_object"}}, of("json", {"type": "object"})),
        (CHAT, {"response_format": OF_OPENAI}, of("json", SCHEMA)),
        (CHAT, {"response_format": TAG}, of("structural_tag", json.dumps(TAG))),
        (COMPLETION, {"response_format": OF_OPENAI}, of("json", SCHEMA)),
        (
            RESPONSE,
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
            of("json", SCHEMA),
        ),
        (RESPONSE, {"text": {"format": {"type": "json_object"}}}, of("json", {"type": "object"})),
        (
            MESSAGE,
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            of("json", SCHEMA),
        ),
        (MESSAGE, {"output_format": {"type": "json_schema", "schema": SCHEMA}}, of("json", SCHEMA)),
        *[
            (path, {"structured_outputs": {kind: value}}, of(kind, value))
            for path in BASE
            for kind, value in {"json": SCHEMA, "regex": "a", "choice": ["a"]}.items()
        ],
        (CHAT, {"structured_outputs": {"json_object": True}}, of("json", {"type": "object"})),
        (CHAT, {"structured_outputs": {"grammar": 'start: "a"'}}, of("grammar", 'start: "a"')),
        (
            CHAT,
            {"structured_outputs": {"structural_tag": TAG}},
            of("structural_tag", json.dumps(TAG)),
        ),
        (COMPLETION, {"guided_json": SCHEMA}, of("json", SCHEMA)),
        (COMPLETION, {"guided_regex": "a"}, of("regex", "a")),
        (COMPLETION, {"guided_choice": ["a", "b"]}, of("choice", ["a", "b"])),
        (COMPLETION, {"guided_grammar": 'start: "a"'}, of("grammar", 'start: "a"')),
    ],
)
async def test_each_field_s_grammar_is_sent_to_the_workers(path, fields, form):
    async with serve() as served:
        served.says("x")
        reply = await served.http.post(path, json=BASE[path] | fields)
        assert reply.status_code == 200, reply.text
        (request,) = served.generator.requests
        assert request.prompt.sampling.grammar == grammar_of(form, ()).text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            "response_format",
        ),
        ({"structured_outputs": {"structural_tag": {"triggers": ["<"]}}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "allowed_token_ids": [5]}, "allowed_token_ids"),
    ],
)
async def test_a_wrong_form_is_refused_by_its_field(fields, param):
    async with serve() as served:
        reply = await served.chat(**fields)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
        assert served.generator.requests == []


def _as_schema(path: str, schema: object) -> tuple[dict[str, Any], str]:
    """The fields that ask for a schema in each API's own way, and which of them is refused."""
    match path:
        case "/v1/responses":
            return {
                "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}
            }, "text"
        case "/v1/messages":
            form = {"type": "json_schema", "schema": schema}
            return {"output_config": {"format": form}}, "output_config"
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    return {"response_format": form}, "response_format"


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize("path", BASE)
@pytest.mark.parametrize(
    ("schema", "at", "why"),
    [
        ({"properties": {"a": {"type": "integr"}}}, ".properties.a.type", "no type 'integr'"),
        ({"properties": {"a": {"minLength": "x"}}}, ".properties.a.minLength", "must be"),
        ({"items": {"anyOf": [{}, {"not": {}}]}}, ".items.anyOf[1].not", "no answer can be held"),
        ({"properties": {"a": {"pattern": "^(?=a)b"}}}, ".properties.a.pattern", "look-around"),
        (_nested(40), ".items" * 32, "more than 32 levels"),
        ({"enum": ["x" * 40_000, "y" * 40_000]}, "", "grammar.max_bytes"),
    ],
    ids=["a type", "a value", "a keyword", "lookaround", "levels", "size"],
)
async def test_each_api_says_where_a_schema_is_wrong(path, schema, at, why):
    fields, param = _as_schema(path, schema)
    async with serve() as served:
        reply = await served.http.post(path, json=BASE[path] | fields)
        assert_refused(path, reply, param)
        message = reply.json()["error"]["message"]
        assert at in message
        assert why in message
        assert served.generator.requests == []


@pytest.mark.parametrize("path", BASE)
@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": "a(?<!b)c"}, "look-around"),
        ({"regex": "a("}, "regex"),
        ({"regex": "x" * 70_000}, "grammar.max_bytes"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"grammar": "root ::= " + '"a" ' * 3000}, "8192 characters"),
        ({"choice": ["a"] * 1025}, "1024"),
    ],
    ids=["ahead", "behind", "no regex", "size", "no grammar", "GBNF's size", "choices"],
)
async def test_each_api_says_why_there_is_no_such_grammar(path, form, why):
    async with serve() as served:
        reply = await served.http.post(path, json=BASE[path] | {"structured_outputs": form})
        assert_refused(path, reply, "structured_outputs")
        assert why in reply.json()["error"]["message"]
        assert served.generator.requests == []


@pytest.mark.timeout(5)
@pytest.mark.parametrize(
    "grammar",
    ['start: "a"\nb: "' + '\\"' * 32_000, 'start: "a"\nb: /' + "\\/" * 32_000, "\n" * 64_000 + "x"],
    ids=["a text", "a regex", "empty lines"],
)
async def test_a_long_grammar_that_is_none_is_read_once(checker, grammar):
    """Read anew from each of its signs, each of these keeps every thread waiting for longer than this test may take."""
    with pytest.raises(InvalidRequestError):
        await checker.text_of(of("grammar", grammar), "tenant")


def assert_refused(path: str, reply: httpx.Response, param: str) -> None:
    """In the API's own shape, by the field's name."""
    assert reply.status_code == 400, reply.text
    if path == MESSAGE:
        error = AnthropicErrorReply.model_validate_json(reply.content, strict=True).error
        assert (error.type, error.message.split(".")[0].split(":")[0]) == (
            "invalid_request_error",
            param,
        )
    else:
        told = ErrorReply.model_validate_json(reply.content, strict=True).error
        assert told.param == param
        assert told.message.startswith(param)


async def test_text_asks_for_no_grammar():
    async with serve() as served:
        served.says("x")
        await served.chat(response_format={"type": "text"})
        assert served.generator.requests[0].prompt.sampling.grammar == ""


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (of("json", '{"\\ud800": 1}'), "not JSON"),
        (of("json", {"maxItems": 10**400}), "out of range"),
        (of("grammar", 'start: %json {"\\ud800": 1}'), "not JSON"),
        (of("grammar", "root ::= " + '"a" ' * 3000), "8192 characters"),
    ],
    ids=["half a surrogate", "a huge count", "half a surrogate within", "a long GBNF"],
)
async def test_what_is_absurd_is_the_clients_fault(form, why):
    checker = GrammarChecker(GrammarConfig(), (), new_registry())
    with pytest.raises(InvalidRequestError, match=why) as refused:
        await checker.text_of(form, "tenant")
    checker.close()
    refused.value.message.encode()


@pytest.mark.parametrize("triggers", [["<|a|>", "<f>"], ["[A]"]])
async def test_triggers_are_all_special_tokens_or_none(triggers):
    checker = GrammarChecker(GrammarConfig(), ("<|a|>", "[A]"), new_registry())
    tag = {
        "triggers": triggers,
        "structures": [{"begin": trigger, "schema": {}, "end": ""} for trigger in triggers],
    }
    with pytest.raises(InvalidRequestError, match="special token"):
        await checker.text_of(of("structural_tag", json.dumps(tag)), "tenant")


async def test_a_tenant_that_has_used_up_its_time_waits_until_as_much_has_passed_and_nobody_else_does():
    """What a check took is known behind it: one may overdraw. A known grammar costs nothing;
    a refused one what it took.
    """
    clock = ManualClock()
    config = GrammarConfig(check_s_per_minute_per_tenant=1e-6)
    checker = GrammarChecker(config, (), new_registry(), clock)
    assert await checker.text_of(of("regex", "a"), "one")
    with pytest.raises(RateLimitedError, match="check_s_per_minute_per_tenant") as refused:
        await checker.text_of(of("regex", "b"), "one")
    assert (refused.value.param, refused.value.reason) == ("field", "grammar_time")
    assert await checker.text_of(of("regex", "a"), "one")
    with pytest.raises(InvalidRequestError):
        await checker.text_of(of("regex", "("), "other")
    with pytest.raises(RateLimitedError):
        await checker.text_of(of("regex", "c"), "other")
    assert refused.value.retry_after_s is not None
    clock.advance(refused.value.retry_after_s + 1e-3)
    assert await checker.text_of(of("regex", "b"), "one")
    checker.close()


async def test_a_client_that_goes_away_is_charged_all_the_same():
    checker = GrammarChecker(
        GrammarConfig(check_s_per_minute_per_tenant=1e-6), (), new_registry(), ManualClock()
    )
    asked = asyncio.create_task(checker.text_of(of("json", SCHEMA), "tenant"))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    async with asyncio.timeout(10):
        await asyncio.gather(*checker._checks)
    with pytest.raises(RateLimitedError):
        await checker.text_of(of("regex", "a"), "tenant")
    checker.close()


class Encoding:
    """Token ids that take until `go_on`, or for ever."""

    def __init__(self) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        self.was_cancelled = False

    async def __call__(self) -> str:
        self.begun.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return "tokens"


async def test_a_form_is_checked_while_the_prompt_is_encoded(checker):
    encoding = Encoding()
    check = checker.begin(of("json", SCHEMA), "tenant")
    both = asyncio.create_task(check.text_beside(encoding))
    async with asyncio.timeout(10):
        grammar = await check.text()
        await encoding.begun.wait()
        assert not both.done()
        encoding.go_on.set()
        assert await both == (grammar, "tokens")


async def test_a_wrong_form_ends_the_encoding_of_the_prompt(checker):
    encoding = Encoding()
    async with asyncio.timeout(10):
        with pytest.raises(InvalidRequestError, match=r"^field\.not: "):
            await checker.begin(of("json", {"not": {}}), "tenant").text_beside(encoding)
    assert encoding.was_cancelled


async def test_what_is_wrong_with_the_form_is_told_before_what_is_wrong_with_the_prompt(checker):
    async def refused() -> None:
        raise InvalidRequestError("the prompt", param="prompt")

    with pytest.raises(InvalidRequestError) as told:
        await checker.begin(of("regex", "("), "tenant").text_beside(refused)
    assert told.value.param == "field"
    with pytest.raises(InvalidRequestError, match="the prompt"):
        await checker.begin(of("regex", "a"), "tenant").text_beside(refused)


async def test_a_client_that_goes_away_while_its_form_is_checked_leaves_nothing_behind():
    checker = GrammarChecker(GrammarConfig(max_compiling_per_tenant=1), (), new_registry())
    encoding = Encoding()
    check = checker.begin(of("json", SCHEMA), "tenant")
    asked = asyncio.create_task(check.text_beside(encoding))
    async with asyncio.timeout(10):
        await encoding.begun.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert encoding.was_cancelled
        await check.text()
        assert await checker.text_of(of("regex", "a"), "tenant")
    checker.close()


@pytest.mark.parametrize("path", BASE)
async def test_each_api_tells_of_a_wrong_form_first(path):
    field = "prompt" if path == COMPLETION else "input" if path == RESPONSE else "messages"
    too_long = "word " * 100_000
    prompt = too_long if path in (COMPLETION, RESPONSE) else [{"role": "user", "content": too_long}]
    async with serve() as served:
        body = BASE[path] | {field: prompt}
        reply = await served.http.post(path, json=body)
        assert (reply.status_code, "maximum context length" in reply.text) == (400, True)
        wrong = {"structured_outputs": {"regex": "("}}
        assert_refused(path, await served.http.post(path, json=body | wrong), "structured_outputs")
        assert served.generator.requests == []


async def test_nobody_waits_for_more_than_one_grammar_of_another_tenant(
    monkeypatch: pytest.MonkeyPatch,
):
    checker = GrammarChecker(GrammarConfig(threads=1), (), new_registry())
    all_have_asked = threading.Event()
    order: list[object] = []

    def make(form: AnswerForm, special_tokens: Iterable[str]) -> Grammar:
        assert all_have_asked.wait(WAIT_S)
        order.append(form.value)
        return grammar_of(form, special_tokens)

    monkeypatch.setattr(grammars, "grammar_of", make)
    asking = [
        asyncio.create_task(checker.text_of(of("regex", f"a{{{number}}}"), "many"))
        for number in range(9)
    ]
    asking.append(asyncio.create_task(checker.text_of(of("regex", "b"), "few")))
    for _ in range(10):
        await asyncio.sleep(0)
    all_have_asked.set()
    await soon(asyncio.gather(*asking))
    assert order == ["a{0}", "b", *(f"a{{{number}}}" for number in range(1, 9))]
    checker.close()


async def test_tenants_that_owe_nothing_are_forgotten():
    checker = GrammarChecker(GrammarConfig(), (), new_registry(), ManualClock())
    for number in range(1100):
        checker._tenants[str(number)] = _Tenant()
    await checker.text_of(of("regex", "a"), "tenant")
    assert list(checker._tenants) == ["tenant"]
    checker.close()


def test_of_calls_no_more_is_written_out_than_a_grammar_may_have(monkeypatch: pytest.MonkeyPatch):
    """Each argument's schema has all definitions that any of them may refer to."""
    definitions = {f"d{number}": {"type": "string"} for number in range(1000)}
    schema: dict[str, Any] = {"$ref": "#/$defs/d0", "$defs": definitions}
    schemas = (schema,) * 900
    written: list[object] = []

    def spelt_out(schema: Any) -> Any:
        written.append(schema)
        return schema

    monkeypatch.setattr("router.generation.answer_form.spelt_out", spelt_out)
    calls = "calls: " + " ".join(f"%json {CALL_SCHEMA}" for _ in schemas)
    form = AnswerForm(kind="calls", value={}, param="tools", calls=calls, call_schemas=schemas)
    with pytest.raises(InvalidRequestError, match=f"^tools: longer than {MAX_GRAMMAR_BYTES}"):
        grammar_of(form, ())
    assert len(written) <= MAX_GRAMMAR_BYTES // len(json.dumps(schema)) + 1


@pytest.mark.parametrize(
    ("lark", "paths"),
    [
        ('start: "%json" %json {"type": "integer"}', [".%json 1"]),
        ('start: "a\\"%json" ', []),
        ('start: "%json {\\"not\\": {}}"', []),
        ("start: /%json {}/", []),
        ("start: /a\\/%json/ %json {}", [".%json 1"]),
        ('start: "a" // %json\n | %json {}', [".%json 1"]),
        ('start: "a" # "%json\n | %json {}', [".%json 1"]),
        ('start: </s> %json {"a": 1} </s>', [".%json 1"]),
        ('start: %json {"const": "%json \\" {"} %json {}', [".%json 1", ".%json 2"]),
        ('start: %regex {"substring_words": "%json {"} %json {}', [".%json 1"]),
        ("start: %json\n{} @{ start: %json {} @}", [".%json 1", ".%json 2"]),
        ('%llguidance {"a": "%json {"}\nstart: %json true', []),
    ],
)
def test_of_a_grammar_those_schemas_are_looked_at_that_it_embeds(lark, paths):
    grammar = grammar_of(of("grammar", lark), ())
    assert [path.removeprefix("field") for path, _ in grammar.schemas] == paths


async def test_a_tenant_over_its_limit_has_no_grammar_translated():
    checker = GrammarChecker(GrammarConfig(max_compiling_per_tenant=0), (), new_registry())
    with pytest.raises(OverloadedError):
        await checker.text_of(of("grammar", "root ::= (((("), "tenant")
