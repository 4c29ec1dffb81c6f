"""Which family a model is of, and grammars whose outputs are the calls that they are for."""

import json
import random

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from baton.errors import ConfigError
from router.generation.answer_form import CALL_SCHEMA, AnswerForm, Kind, grammar_of
from router.parsing.families import REASONING_FAMILIES, TOOL_FAMILIES
from router.parsing.output_format import OutputFormat, ToolSchema, detect_format
from tests.router.parsing.test_parser import Said, said
from tests.router.text.tiny_tokenizers import token_id

END = "<|im_end|>"
TOOLS = (
    ToolSchema(
        name="add",
        parameters={
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": ["boolean", "null"]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    ),
    ToolSchema(
        name="walk",
        parameters={
            "$ref": "#/$defs/walk",
            "$defs": {
                "walk": {
                    "type": "object",
                    "properties": {"to": {"$ref": "#/$defs/place"}},
                    "required": ["to"],
                    "additionalProperties": False,
                },
                "place": {"enum": ["here", "there"]},
            },
        },
    ),
    ToolSchema(
        name="run",
        parameters={
            "type": "object",
            "properties": {
                "fast": {"type": "boolean"},
                "far": {"type": "integer", "minimum": 0, "maximum": 99},
                "to": {"$ref": "#/$defs/place"},
                "via": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2},
            },
            "required": ["far"],
            "$defs": {"place": {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"], "additionalProperties": False}},
        },
    ),
    ToolSchema(
        name="pick",
        parameters={
            "type": "object",
            "properties": {"s": {"enum": ["x", 'y"']}, "n": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 2}},
            "required": ["s"],
            "additionalProperties": False,
        },
    ),
)  # fmt: skip


def byte_tokenizer(marks: tuple[str, ...], *, special: bool) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, special=True)])
    made.add_tokens([AddedToken(mark, special=special) for mark in marks])
    return made


def drawn(grammar: str, tokenizer: Tokenizer, seed: int) -> list[int]:
    """Tokens that the grammar allows, drawn at random; it is left where it may be."""
    end = tokenizer.token_to_id(END)
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=end), grammar)
    mask = allocate_token_bitmask(1, tokenizer.get_vocab_size())
    numbers, tokens = random.Random(seed), list[int]()
    while not matcher.is_stopped():
        fill_next_token_bitmask(matcher, mask)
        allowed = [i for i in range(mask.size * 32) if mask[0][i // 32] >> (i % 32) & 1]
        token = end if end in allowed else numbers.choice(allowed)
        assert matcher.consume_token(token), matcher.get_error()
        tokens.append(token)
        assert len(tokens) < 3000
    return [token for token in tokens if token != end]


def parse(made: OutputFormat, tokenizer: Tokenizer, tokens: list[int], *, inside: bool) -> Said:
    parser = made.parser(TOOLS, in_reasoning=inside)
    events = []
    pending: list[int] = []
    for token in [*tokens, None]:
        if token is not None and token not in parser.marker_ids:
            pending.append(token)
            continue
        events += parser.push_text(tokenizer.decode(pending, skip_special_tokens=False))
        pending = []
        if token is not None:
            events += parser.push_marker(token)
    return said([*events, *parser.finish()])


FAMILIES = [name for name, family in TOOL_FAMILIES.items() if name != "qwen3_coder"]


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_the_grammar_of_calls_allows_is_calls(family: str, as_tokens: bool) -> None:
    marks = TOOL_FAMILIES[family].marks
    tokenizer = byte_tokenizer(marks if as_tokens else (), special=family != "hermes")
    made = detect_format(None, tokenizer.token_to_id, tool_call_parser=family)
    assert made.can_require
    form = AnswerForm(
        kind="calls",
        value={tool.name: tool.parameters for tool in TOOLS},
        param="tools",
        calls=made.calls_lark(TOOLS, parallel=True, schema=CALL_SCHEMA),
        call_schemas=tuple(made.call_schemas(TOOLS)),
    )
    grammar = grammar_of(form, ()).text
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    for seed in range(4):
        found = parse(made, tokenizer, drawn(grammar, tokenizer, seed), inside=False)
        assert found.calls
        assert not found.content
        for name, arguments in found.calls:
            jsonschema_rs.validate(schemas[name], json.loads(arguments))


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("inside", [True, False])
def test_reasoning_ends_after_its_tokens_and_the_answer_follows(
    as_tokens: bool, inside: bool
) -> None:
    family = REASONING_FAMILIES["qwen3"]
    marks = (family.begin, family.end) if as_tokens else ()
    tokenizer = byte_tokenizer(marks, special=False)
    made = detect_format(None, tokenizer.token_to_id, reasoning_parser="qwen3")
    form = AnswerForm(
        kind="json",
        value=TOOLS[0].parameters,
        param="response_format",
        reasoning=made.reasoning_lark(7, in_reasoning=inside),
        must_reason=True,
    )
    grammar = grammar_of(form, ()).text
    for seed in range(4):
        tokens = drawn(grammar, tokenizer, seed)
        found = parse(made, tokenizer, tokens, inside=inside)
        jsonschema_rs.validate(TOOLS[0].parameters, json.loads(found.content))
        if as_tokens:
            assert tokens.index(token_id(tokenizer, family.end)) <= 7 + (not inside)


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("kind", ["json", "calls", "text"])
def test_messages_of_harmony_are_held_to_headers_and_forms(
    kind: Kind, inside: bool, as_tokens: bool
) -> None:
    marks = REASONING_FAMILIES["openai_gptoss"].marks
    tokenizer = byte_tokenizer(marks if as_tokens else (), special=True)
    made = detect_format("<|channel|><|message|>", tokenizer.token_to_id)
    assert len(made.stop_ids) == (2 if as_tokens else 0)
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    values = {"json": schemas["add"], "calls": schemas, "text": made.any_lark()}
    header = kind == "json"
    form = AnswerForm(
        kind=kind,
        value=values[kind],
        param="tools",
        calls=made.calls_lark(TOOLS, parallel=True, schema=CALL_SCHEMA),
        call_schemas=tuple(made.call_schemas(TOOLS)),
        reasoning=made.reasoning_lark(7, in_reasoning=inside, before_text=header),
        must_reason=inside or header,
    )
    grammar = grammar_of(form, ()).text
    reasoned = 0
    for seed in range(6):
        tokens = drawn(grammar, tokenizer, seed)
        found = parse(made, tokenizer, tokens, inside=inside)
        reasoned += bool(found.reasoning)
        if kind == "json":
            jsonschema_rs.validate(schemas["add"], json.loads(found.content))
        assert len(found.calls) == (kind == "calls")
        for name, arguments in found.calls:
            jsonschema_rs.validate(schemas[name], json.loads(arguments))
            assert not found.content
        if as_tokens:
            assert len(found.reasoning.encode()) <= 7 * 4
    assert reasoned or not inside


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ '<tool_call>' }}", "hermes", None),
        ("<tool_call><function= </think>", "qwen3_coder", "qwen3"),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("<｜tool▁call▁begin｜> ```json </think>", "deepseek_v3", "deepseek_r1"),
        ("<｜tool▁call▁begin｜>", "deepseek_v31", None),
        ('<|start_header_id|> {"name": "f", "parameters": {}}', "llama3_json", None),
        ("<|start_header_id|> [func_name1(params_name1=params_value1)]", "pythonic", None),
        ("<|header_start|> [func_name1(params_name1=params_value1)]", "llama4_pythonic", None),
        ("<|start|>assistant<|channel|>final<|message|>", "openai", "openai_gptoss"),
        ("plain", None, None),
        (None, None, None),
    ],
)
def test_the_family_is_known_by_what_the_template_writes(
    template: str | None, tools: str | None, reasoning: str | None
) -> None:
    made = detect_format(template, lambda mark: None)
    assert (made.tools.name if made.tools else None) == tools
    assert (made.reasoning.name if made.reasoning else None) == reasoning


def test_names_that_there_are_not_are_refused_by_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="hermes") as raised:
        detect_format("x", lambda mark: None, tool_call_parser="hermse")
    assert raised.value.param == "router.tool_call_parser"
    with pytest.raises(ConfigError, match="qwen3"):
        detect_format("x", lambda mark: None, reasoning_parser="none of them")
    with pytest.raises(ConfigError, match="openai_gptoss does not go together") as raised:
        detect_format("<|channel|><|message|>", lambda mark: None, tool_call_parser="hermes")
    assert raised.value.param == "router.reasoning_parser"
    none = detect_format(
        "<tool_call></think>", lambda mark: None, tool_call_parser="none", reasoning_parser="none"
    )
    assert (none.tools, none.reasoning) == (None, None)
