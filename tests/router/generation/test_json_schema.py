"""Schemas by the hundred: what an answer that follows one can be is what the schema allows,
and what cannot be held to is refused by name.
"""

import importlib
import json
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from datetime import date
from glob import glob
from pathlib import Path
from random import Random
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import JsonValue

from baton.config.schema import GrammarConfig
from baton.errors import InvalidRequestError
from baton.telemetry.metrics import new_registry
from router.generation.answer_form import AnswerForm
from router.generation.grammars import GrammarChecker
from router.generation.json_schema import spelt_out
from tests.router.generation.random_answers import random_answer
from tests.router.generation.schema_kinds import KINDS, with_a_demand_too_much
from tests.router.served import tiny_tokenizer

SUITE = "BATON_JSON_SCHEMA_SUITE"
_MOST_TOKENS = 400
_RUSTS = {"zero-width whitespace does not match"}
"""Cases in which llguidance's expressions, which are Rust's, differ from ECMA's: U+FEFF is no space there."""
_NOT_PYTHONS = {"ecmascript-regex", "multipleOf"}
"""Files of the suite that Python's library does not judge: its expressions are not ECMA's,
and it divides by 0.0001 in floating point.
"""
_NOT_READ_BY_PYTHON = "\\p{"
"""Classes of characters by their property, which its expressions do not have."""


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    made = tiny_tokenizer()
    (end,) = [i for i in made.special_ids if made.backend.id_to_token(i) == "<|end|>"]
    made.close()
    return LLTokenizer(made.backend.to_str(), eos_token=end)


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    config = GrammarConfig(check_s_per_minute_per_tenant=1e6)
    made = GrammarChecker(config, (), new_registry())
    yield made
    made.close()


async def grammar_of(checker: GrammarChecker, schema: Any) -> str:
    return await checker.text_of(AnswerForm(kind="json", value=schema, param="field"), "tenant")


def takes(vocabulary: LLTokenizer, grammar: str, text: str) -> bool:
    """Whether `text` is a whole answer."""
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = vocabulary.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def keywords(schema: Any) -> Iterator[str]:
    """All names in a schema."""
    if isinstance(schema, dict):
        for name, value in schema.items():
            yield name
            yield from keywords(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from keywords(value)


BEYOND = object()
"""An answer with a number that doubles do not hold exactly: libraries divide and compare others."""


def read(answer: bytes) -> object:
    numbers = [0.0]

    def noted(text: str) -> float | int:
        numbers.append(float(text))
        return int(text) if text.lstrip("-").isdecimal() else numbers[-1]

    value = json.loads(answer, parse_float=noted, parse_int=noted)
    return value if max(map(abs, numbers)) < 2**53 else BEYOND


Judge = Callable[[Any], object]


def judge(schema: Any) -> Judge:
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    return validator.validate


def judge_of_pythons_own(schema: Any) -> Judge:
    jsonschema = importlib.import_module("jsonschema")
    kind = jsonschema.Draft202012Validator
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    return lambda value: validator.validate(value)


async def check_kind(
    kind: str,
    checker: GrammarChecker,
    vocabulary: LLTokenizer,
    judges: list[Any],
    sizes: range,
    seeds: int,
) -> None:
    found: Counter[str] = Counter()
    for number in sizes:
        rng = Random(f"{kind} {number}")
        schema = KINDS[kind](rng)
        if number % 5 == 4:
            schema, keyword = with_a_demand_too_much(rng, schema)
            with pytest.raises(InvalidRequestError) as refused:
                await grammar_of(checker, schema)
            assert refused.value.code == "unsupported_parameter"
            assert re.match(rf"field\S*\.{re.escape(keyword)}: ", refused.value.message)
            continue
        grammar = await grammar_of(checker, schema)
        for seed in range(seeds):
            answer = random_answer(vocabulary, grammar, seed, _MOST_TOKENS)
            found["ended" if answer is not None else "cut"] += 1
            if answer is not None and (value := read(answer)) is not BEYOND:
                for judge_of in judges:
                    judge_of(schema)(value)
    assert found["ended"] > found["cut"], found


@pytest.mark.parametrize("kind", KINDS)
async def test_answers_of_each_kind_of_schema_validate(kind, checker, vocabulary):
    await check_kind(kind, checker, vocabulary, [judge], range(12), seeds=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_answers_of_two_hundred_schemas_validate(kind, checker, vocabulary):
    """By the Python library too."""
    pytest.importorskip("jsonschema")
    judges = [judge, judge_of_pythons_own]
    await check_kind(kind, checker, vocabulary, judges, range(34), seeds=20)


@pytest.mark.slow
async def test_the_drafts_own_suite(checker, vocabulary):
    """No answer is taken that a case calls invalid; answers that end validate;
    what is refused names its keyword, unless it allows nothing.

    The suite is json-schema-org/JSON-Schema-Test-Suite on GitHub, of which this takes tests/draft2020-12.
    """
    if not (directory := os.environ.get(SUITE)):
        pytest.skip(f"{SUITE} does not name the suite's directory")
    pytest.importorskip("jsonschema")
    wrong: list[str] = []
    found: Counter[str] = Counter()
    for path in map(Path, sorted(glob(f"{directory}/**/*.json", recursive=True))):
        for group in json.loads(path.read_text(encoding="utf-8")):
            schema, name = group["schema"], f"{path.stem}: {group['description']}"
            beyond_python = path.stem in _NOT_PYTHONS or _NOT_READ_BY_PYTHON in str(schema)
            judges = [judge] if beyond_python else [judge, judge_of_pythons_own]
            if isinstance(schema, bool):
                continue  # no field of a request takes one
            try:
                grammar = await grammar_of(checker, schema)
            except InvalidRequestError as error:
                found["refused"] += 1
                said = error.message
                if "Unsatisfiable" not in said and not any(k in said for k in keywords(schema)):
                    wrong.append(f"{name}: refused without a keyword: {said}")
                continue
            found["taken"] += 1
            for case in group["tests"]:
                texts = {json.dumps(case["data"], ensure_ascii=ascii) for ascii in (True, False)}
                wrong += [
                    f"{name}: takes {text[:100]}: {case['description']}"
                    for text in texts
                    if not case["valid"] and takes(vocabulary, grammar, text)
                    if case["description"] not in _RUSTS
                ]
            for seed in range(10):
                answer = random_answer(vocabulary, grammar, seed, _MOST_TOKENS)
                if answer is None or (value := read(answer)) is BEYOND:
                    continue
                found["ended"] += 1
                try:
                    for judge_of in judges:
                        judge_of(schema)(value)
                except Exception as error:  # noqa: BLE001 - all are told at the end
                    wrong.append(f"{name}: answers {answer[:100]!r}: {str(error)[:200]}")
    assert wrong == []
    assert found["taken"] > 150
    assert found["ended"] > 1000


@pytest.mark.parametrize(
    "answer",
    ['{"\\u0061": "x"}', '{"a": 1, "\\u0061": "x"}', '{"b\\u0062": 1}', '{"\\ud83d\\udc32": 1}'],
)
async def test_no_name_is_written_in_numbers_past_what_holds_for_it(answer, checker, vocabulary):
    schema = {
        "properties": {"a": {"type": "integer"}},
        "patternProperties": {"^(bb|\U0001f432)$": {"type": "string"}},
    }
    grammar = await grammar_of(checker, schema)
    assert takes(vocabulary, grammar, '{"a": 1, "b": 1, "bb\\n": 2, "\U0001f432": "x"}')
    assert not takes(vocabulary, grammar, answer)


async def test_schemas_that_a_grammar_embeds_are_held_to_in_the_same_way(checker, vocabulary):
    lark = 'start: "a%json" %json {"properties": {"a": {"type": "integer"}}} "!" %json {"format": "date"}'
    form = AnswerForm(kind="grammar", value=lark, param="field")
    grammar = await checker.text_of(form, "tenant")
    assert takes(vocabulary, grammar, 'a%json{"a": 1}!"2024-02-29"')
    assert not takes(vocabulary, grammar, 'a%json{"\\u0061": "x"}!1')
    assert not takes(vocabulary, grammar, 'a%json{"a":' + " " * 33 + "1}!1")
    assert not takes(vocabulary, grammar, 'a%json{"a": 1}!"2023-02-29"')


@pytest.mark.parametrize(
    ("named", "right", "wrong"),
    [
        (
            "date",
            ["2024-02-29", "2000-02-29", "0001-12-31"],
            ["2023-02-29", "1900-02-29", "0000-01-01"],
        ),
        ("time", ["23:59:59Z", "00:00:00.5+01:00"], ["23:59:60Z", "22:59:60+00:00"]),
        ("date-time", ["2024-02-29T23:59:59Z"], ["2023-02-29T00:00:00Z", "1998-12-31T23:59:60Z"]),
    ],
)
async def test_dates_and_times_are_real(named, right, wrong, checker, vocabulary):
    for schema in (
        {"type": "string", "format": named},
        {"format": named, "allOf": [{"minLength": 3}]},
    ):
        grammar = await grammar_of(checker, {"items": {"anyOf": [{"type": "null"}, schema]}})
        assert [text for text in right if not takes(vocabulary, grammar, f'["{text}", null]')] == []
        assert [text for text in wrong if takes(vocabulary, grammar, f'["{text}"]')] == []


@pytest.mark.parametrize(
    ("name", "is_taken"),
    [
        ("a--b.com", True),
        ("ab-.c-d", False),
        ("abc-d.x1", True),
        ("xn--9n2bp8q.com", False),
        ("www.XN--aa---o47jg78q", False),
        ("ab--c", False),
        (".".join(["a" * 63] * 3 + ["b" * 61]), True),
        (".".join(["a" * 63] * 3 + ["b" * 62]), False),
    ],
)
@pytest.mark.parametrize("schema", [{"format": "hostname"}, {"format": "hostname", "minLength": 1}])
async def test_a_host_has_a_name_that_dns_can_hold(schema, name, is_taken, checker, vocabulary):
    """Of international names, as DNS writes them, no regular expression says which are real: none is taken."""
    grammar = await grammar_of(checker, {"items": schema})
    assert takes(vocabulary, grammar, f'["{name}"]') == is_taken


@pytest.mark.parametrize("named", ["idn-hostname", "idn-email", "iri", "iri-reference"])
async def test_a_format_that_no_expression_says_is_refused_by_its_name(named, checker):
    with pytest.raises(InvalidRequestError, match=named) as refused:
        await grammar_of(checker, {"items": {"format": named}})
    assert refused.value.code == "unsupported_parameter"
    assert refused.value.message.startswith("field.items.format: ")


def taken(vocabulary: LLTokenizer, grammar: str, texts: Iterable[str]) -> set[str]:
    """Which of `texts` are whole answers, as JSON."""
    fresh = LLMatcher(vocabulary, grammar, log_level=0)
    assert not fresh.is_error(), fresh.get_error()
    found = set()
    for text in texts:
        matcher, tokens = fresh.deep_copy(), vocabulary.tokenize_bytes(f'"{text}"'.encode())
        if matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting():
            found.add(text)
    return found


def _is_a_day(text: str) -> bool:
    try:
        return bool(date.fromisoformat(text))
    except ValueError:
        return False


async def test_every_day_of_the_calendar_is_a_date_and_nothing_else_is(checker, vocabulary):
    years = (0, 1, 4, 10, 96, 100, 400, 1000, 1900, 1996, 2000, 2023, 2100, 2400, 9999)
    texts = [f"{y:04}-{m:02}-{d:02}" for y in years for m in range(14) for d in range(33)]
    days = set(filter(_is_a_day, texts))
    assert 5000 < len(days) < len(texts)
    grammar = await grammar_of(checker, {"format": "date"})
    assert taken(vocabulary, grammar, texts) == days
    grammar = await grammar_of(checker, {"format": "date-time"})
    assert taken(vocabulary, grammar, [f"{text}t12:30:00z" for text in texts]) == {
        f"{day}t12:30:00z" for day in days
    }


async def test_a_format_holds_beside_a_pattern_and_for_texts_alone(checker, vocabulary):
    grammar = await grammar_of(checker, {"format": "date", "pattern": "^2024-0", "maxLength": 10})
    asked = ["2024-02-29", "2024-12-01", "2024-02-30", "2024-0"]
    assert taken(vocabulary, grammar, asked) == {"2024-02-29"}
    assert takes(vocabulary, grammar, "17")


def test_values_that_look_like_schemas_are_left_as_they_are():
    schema: JsonValue = {
        "const": {"format": "date"},
        "enum": [{"format": "date"}],
        "default": {"format": "time"},
    }
    assert spelt_out(schema) == schema


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"items": {"const": "a\x01"}}, ".items.const: "),
        ({"enum": ["a", {"b\x7f": 1}]}, ".enum: "),
        ({"properties": {"\x1f": {}}}, ".properties: "),
        ({"required": ["\x0b"]}, ".required: "),
        ({"items": {"$ref": "elsewhere.json"}}, ".items.$ref: "),
        ({"items": {"exclusiveMaximum": 9.727837981879871e26}}, ".items.exclusiveMaximum: "),
        ({"$schema": "http://localhost/mine"}, ".$schema: "),
    ],
)
async def test_what_llguidance_cannot_hold_to_is_refused_by_its_keyword(schema, path, checker):
    with pytest.raises(InvalidRequestError) as refused:
        await grammar_of(checker, schema)
    assert refused.value.message.startswith(f"field{path}")


async def test_a_schema_whose_formats_make_it_too_long_is_refused(checker):
    schema = {"anyOf": [{"format": "date-time"}] * 2000}
    with pytest.raises(InvalidRequestError, match="formats"):
        await grammar_of(checker, schema)
