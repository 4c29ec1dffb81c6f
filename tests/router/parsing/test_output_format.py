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
from router.http.fields import JsonObject
from router.openai.requests import ChatCompletionRequest
from router.parsing.families import REASONING_FAMILIES, TOOL_FAMILIES
from router.parsing.output_format import OutputFormat, ToolSchema, detect_format
from router.parsing.tagged_calls import tagged_arguments
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
TAGGED = (
    *TOOLS[:1],
    ToolSchema(name="now", parameters={"type": "object", "properties": {}}),
    ToolSchema(
        name="note",
        parameters={
            "type": "object",
            "properties": {
                "text": {"type": "string", "minLength": 2, "maxLength": 9},
                "kind": {"$ref": "#/$defs/kind"},
                "days": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "null"}]},
                "mood": {"anyOf": [{"enum": ["good", "bad"], "type": "string"}, {"type": "null"}]},
                "to": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
                "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
                "at": {"$ref": "#/$defs/place"},
                "level": {"enum": [1, "high", None]},
            },
            "required": ["text", "kind", "at"],
            "additionalProperties": False,
            "$defs": {
                "kind": {"enum": ["null", "</a", 'y"']},
                "place": {"type": "object", "properties": {"x": {"const": "</parameter>"}}, "required": ["x"], "additionalProperties": False},
            },
        },
    ),
)  # fmt: skip
"""Those whose arguments can be written one by one, some as texts."""


def tools_of(family: str) -> tuple[ToolSchema, ...]:
    return TAGGED if family == "qwen3_coder" else TOOLS


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


def drawn_freely(
    grammar: str, tokenizer: Tokenizer, numbers: random.Random, lead: str
) -> list[int]:
    """The same with a bent to begin calls: `lead` is what they begin with. After some tokens it ends where it may."""
    end, begin = tokenizer.token_to_id(END), tokenizer.token_to_id(lead)
    spelt = tokenizer.encode(lead, add_special_tokens=False).ids
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=end), grammar)
    mask = allocate_token_bitmask(1, tokenizer.get_vocab_size())
    tokens, wanted = list[int](), list[int]()
    while not matcher.is_stopped():
        fill_next_token_bitmask(matcher, mask)
        allowed = [i for i in range(mask.size * 32) if mask[0][i // 32] >> (i % 32) & 1]
        if not wanted and numbers.random() < 0.3:
            wanted = [begin] if begin is not None else list(spelt)
        others = [i for i in allowed if i != end] or allowed
        token = wanted.pop(0) if wanted and wanted[0] in allowed else numbers.choice(others)
        if len(tokens) > 60 and end in allowed:
            token = end
        assert matcher.consume_token(token), matcher.get_error()
        tokens.append(token)
        assert len(tokens) < 3000
    return [token for token in tokens if token != end]


def parse(
    made: OutputFormat,
    tokenizer: Tokenizer,
    tokens: list[int],
    *,
    inside: bool,
    tools: tuple[ToolSchema, ...] = TOOLS,
) -> Said:
    parser = made.parser(tools, in_reasoning=inside)
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


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("family", TOOL_FAMILIES)
def test_whatever_the_grammar_of_calls_allows_is_calls(family: str, as_tokens: bool) -> None:
    marks = TOOL_FAMILIES[family].marks
    tokenizer = byte_tokenizer(marks if as_tokens else (), special=family != "hermes")
    made = detect_format(None, tokenizer.token_to_id, tool_call_parser=family)
    tools = tools_of(family)
    assert made.unheld(tools) is None
    form = AnswerForm(
        kind="calls",
        value={tool.name: tool.parameters for tool in tools},
        param="tools",
        calls=made.calls_lark(tools, parallel=True, schema=CALL_SCHEMA),
        call_schemas=tuple(made.call_schemas(tools)),
    )
    grammar = grammar_of(form, ()).text
    schemas = {tool.name: tool.parameters for tool in tools}
    for seed in range(6):
        found = parse(made, tokenizer, drawn(grammar, tokenizer, seed), inside=False, tools=tools)
        assert found.calls
        assert not found.content
        for name, arguments in found.calls:
            jsonschema_rs.validate(schemas[name], json.loads(arguments))


PLACE: JsonObject = {
    "properties": {"x": {"type": "boolean"}},
    "required": ["x"],
    "additionalProperties": False,
}
NOT_ONLY_OBJECTS: dict[str, JsonObject] = {
    "no type": PLACE,
    "several types": PLACE | {"type": ["null", "object"]},
    "alternatives": {"anyOf": [PLACE, {"type": "null"}]},
    "a reference": {"$ref": "#/$defs/place", "$defs": {"place": PLACE}},
    "within itself": {
        "$ref": "#/$defs/list",
        "$defs": {
            "list": {
                "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/list"}]}},
                "required": ["next"],
                "additionalProperties": False,
            }
        },
    },
    "values": {"enum": [7, {"x": True}]},
}


@pytest.mark.parametrize("kind", NOT_ONLY_OBJECTS)
@pytest.mark.parametrize("family", TOOL_FAMILIES)
def test_arguments_are_objects_whatever_else_their_schema_takes(family: str, kind: str) -> None:
    tokenizer = byte_tokenizer(TOOL_FAMILIES[family].marks, special=True)
    made = detect_format(None, tokenizer.token_to_id, tool_call_parser=family)
    tools = (ToolSchema(name="f", parameters=NOT_ONLY_OBJECTS[kind]),)
    assert tools[0].takes_objects
    if made.unheld(tools) is not None:
        assert family == "qwen3_coder"
        assert kind not in ("no type", "several types")
        return
    form = AnswerForm(
        kind="calls",
        value={"f": tools[0].parameters},
        param="tools",
        calls=made.calls_lark(tools, parallel=False, schema=CALL_SCHEMA),
        call_schemas=tuple(made.call_schemas(tools)),
    )
    grammar = grammar_of(form, ()).text
    for seed in range(8):
        found = parse(made, tokenizer, drawn(grammar, tokenizer, seed), inside=False, tools=tools)
        assert not found.content
        ((_, arguments),) = found.calls
        jsonschema_rs.validate(tools[0].parameters, json.loads(arguments))


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(
    ("family", "as_tokens"),
    [
        ("hermes", True),
        ("hermes", False),
        ("qwen3_coder", True),
        ("qwen3_coder", False),
        ("mistral", True),
        ("mistral", False),
        ("deepseek_v3", True),
        ("deepseek_v31", True),
        ("openai", True),
    ],
)
def test_every_call_that_is_begun_is_whole_where_tools_are_strict(
    family: str, as_tokens: bool, parallel: bool
) -> None:
    written, tools = TOOL_FAMILIES[family], tools_of(family)
    tokenizer = byte_tokenizer(written.marks if as_tokens else (), special=True)
    made = detect_format(None, tokenizer.token_to_id, tool_call_parser=family)
    assert made.can_hold
    form = AnswerForm(
        kind="calls",
        value={tool.name: tool.parameters for tool in tools},
        param="tools",
        calls=made.strict_lark(tools, parallel=parallel, schema=CALL_SCHEMA, thinks=True),
        call_schemas=tuple(made.call_schemas(tools)),
    )
    grammar = grammar_of(form, ()).text
    schemas = {tool.name: tool.parameters for tool in tools}
    calls, texts = 0, 0
    lead = written.section[0] or written.begin or "<|channel|>"
    for seed in range(12):
        numbers = random.Random(seed)
        tokens = drawn_freely(grammar, tokenizer, numbers, lead)
        found = parse(made, tokenizer, tokens, inside=False, tools=tools)
        calls += len(found.calls)
        texts += bool(found.content)
        assert parallel or len(found.calls) <= 1
        assert lead not in found.content
        for name, arguments in found.calls:
            jsonschema_rs.validate(schemas[name], json.loads(arguments))
    assert calls
    assert texts


def test_a_header_of_harmony_may_be_written_in_each_way_that_it_is() -> None:
    tokenizer = byte_tokenizer(TOOL_FAMILIES["openai"].marks, special=True)
    made = detect_format("<|channel|><|message|>", tokenizer.token_to_id)
    form = AnswerForm(
        kind="calls",
        value={"add": TOOLS[0].parameters},
        param="tools",
        calls=made.strict_lark(TOOLS[:1], parallel=True, schema=CALL_SCHEMA, thinks=True),
        call_schemas=tuple(made.call_schemas(TOOLS[:1])),
    )
    grammar = grammar_of(form, ()).text
    said_before = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    said_before += "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant"
    for header in (
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.add<|message|>",
        " to=functions.add<|channel|>commentary json<|message|>",
    ):
        for before in ("", said_before):
            assert accepted(grammar, tokenizer, before + header + '{"a": 1}'), header
            assert not accepted(grammar, tokenizer, before + header + '{"a": ""}'), header
    assert accepted(grammar, tokenizer, said_before + "<|channel|>final<|message|>It is 2.")
    assert not accepted(grammar, tokenizer, "<|channel|>commentary to=functions.sub<|message|>{}")


def test_a_header_of_harmony_names_any_tool_where_only_reasoning_is_held() -> None:
    tokenizer = byte_tokenizer(TOOL_FAMILIES["openai"].marks, special=True)
    made = detect_format("<|channel|><|message|>", tokenizer.token_to_id)
    reasoning = made.reasoning_lark(7, in_reasoning=False)
    form = AnswerForm(kind="text", value=made.any_lark(), param="x", reasoning=reasoning)
    before = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = f"<|channel|>commentary to=functions.{'n' * 128} <|constrain|>json<|message|>{{}}"
    assert accepted(grammar_of(form, ()).text, tokenizer, before + call)


@pytest.mark.parametrize("family", TOOL_FAMILIES)
def test_calls_are_held_where_a_mark_begins_all_of_them(family: str) -> None:
    held = detect_format(None, lambda mark: hash(mark), tool_call_parser=family).can_hold
    loose = {"llama3_json", "pythonic", "llama4_pythonic"}
    assert held == (family not in loose)
    as_text = detect_format(None, lambda mark: None, tool_call_parser=family).can_hold
    assert as_text == (family in ("hermes", "qwen3_coder", "mistral"))


def accepted(grammar: str, tokenizer: Tokenizer, text: str) -> bool:
    end = tokenizer.token_to_id(END)
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=end), grammar)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("content", "is_taken"),
    [
        ("a\nb <parameter=line>\n</functions>\n\n", True),
        ("<parameter=line>", False),
        ("a\n<parameter=line>\nb", False),
        ("a\n</function>\n</tool_call>\nb", False),
    ],
)
def test_a_held_text_has_no_line_that_the_parser_ends_a_value_at(
    content: str, is_taken: bool, as_tokens: bool
) -> None:
    marks = TOOL_FAMILIES["qwen3_coder"].marks if as_tokens else ()
    tokenizer = byte_tokenizer(marks, special=False)
    made = detect_format(None, tokenizer.token_to_id, tool_call_parser="qwen3_coder")
    properties: JsonObject = {"content": {"type": "string"}, "line": {"type": "integer"}}
    arguments: JsonObject = {
        "type": "object",
        "properties": properties,
        "required": ["content", "line"],
        "additionalProperties": False,
    }
    tools = [ToolSchema(name="write", parameters=arguments, strict=True)]
    form = AnswerForm(
        kind="calls",
        value={"write": arguments},
        param="tools",
        calls=made.calls_lark(tools, parallel=True, schema=CALL_SCHEMA),
        call_schemas=tuple(made.call_schemas(tools)),
    )
    text = (
        f"<tool_call>\n<function=write>\n<parameter=content>\n{content}\n</parameter>\n"
        "<parameter=line>\n3\n</parameter>\n</function>\n</tool_call>"
    )
    assert accepted(grammar_of(form, ()).text, tokenizer, text) == is_taken


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
def test_strict_tools_are_held_to_in_calls_without_their_mark(as_tokens: bool) -> None:
    marks = TOOL_FAMILIES["qwen3_coder"].marks if as_tokens else ()
    tokenizer = byte_tokenizer(marks, special=False)
    made = detect_format(None, tokenizer.token_to_id, tool_call_parser="qwen3_coder")
    form = AnswerForm(
        kind="calls",
        value={tool.name: tool.parameters for tool in TAGGED[:2]},
        param="tools",
        calls=made.strict_lark(TAGGED[:2], parallel=True, schema=CALL_SCHEMA, thinks=True),
        call_schemas=tuple(made.call_schemas(TAGGED[:2])),
    )
    grammar = grammar_of(form, ()).text
    bare = "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n"
    end = "</tool_call>"
    for text in (
        bare,
        f"Well: {bare}{end} and <tool_call>\n{bare}{end}{bare}{end}",
        f"{bare}\n{bare}<function=now>\n</function>\n",
        "a <function=sub> is not there, nor is <function=addition> or <function=",
    ):
        assert accepted(grammar, tokenizer, text), text
    for text in (
        bare.replace("1", "x"),
        f"Well: {bare}{end}{bare.replace('1', 'x')}",
        "what <function=add> does",
        f"<tool_call>\n{bare.replace('add', 'sub')}{end}",
    ):
        assert not accepted(grammar, tokenizer, text), text


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
def test_text_is_free_where_tools_are_strict_and_calls_are_not(as_tokens: bool) -> None:
    marks = (*TOOL_FAMILIES["hermes"].marks, "<think>", "</think>") if as_tokens else ()
    tokenizer = byte_tokenizer(marks, special=False)
    made = detect_format("<tool_call></think>", tokenizer.token_to_id)
    form = AnswerForm(
        kind="calls",
        value={"add": TOOLS[0].parameters},
        param="tools",
        calls=made.strict_lark(TOOLS[:1], parallel=True, schema=CALL_SCHEMA, thinks=True),
        call_schemas=tuple(made.call_schemas(TOOLS[:1])),
        reasoning=made.reasoning_lark(None, in_reasoning=False),
    )
    grammar = grammar_of(form, ()).text
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    for text in (
        "",
        "Hi {<tool\n",
        call,
        f"<think>hm</think>\n\n{call}",
        f"Well: {call}\n{call} é",
    ):
        assert accepted(grammar, tokenizer, text), text
    for text in (
        call.replace("1", '"1"'),
        call.replace("add", "sub"),
        f"<think>hm</think>{call}x{call[:-20]}",
        "a<tool_call>b",
    ):
        assert not accepted(grammar, tokenizer, text), text


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


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
def test_reasoning_without_a_budget_ends_where_the_model_ends_it(as_tokens: bool) -> None:
    tokenizer = byte_tokenizer(("<think>", "</think>") if as_tokens else (), special=False)
    made = detect_format("</think>", tokenizer.token_to_id)
    form = AnswerForm(
        kind="json",
        value=TOOLS[0].parameters,
        param="response_format",
        reasoning=made.reasoning_lark(None, in_reasoning=True),
        must_reason=True,
    )
    grammar = grammar_of(form, ()).text
    assert accepted(grammar, tokenizer, 'hm < 1</think>\n{"a": 1}')
    assert not accepted(grammar, tokenizer, '{"a": 1}')


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


def test_a_tool_of_tagged_calls_is_taken_apart_once_for_a_request(monkeypatch: pytest.MonkeyPatch):
    taken_apart: list[object] = []

    def noted(parameters: JsonObject) -> object:
        taken_apart.append(parameters)
        return tagged_arguments(parameters)

    monkeypatch.setattr("router.parsing.output_format.tagged_arguments", noted)
    made = OutputFormat(tools=TOOL_FAMILIES["qwen3_coder"], reasoning=None, marker_ids={})
    body = ChatCompletionRequest.model_validate(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
            "tool_choice": "required",
        }
    )
    for _ in range(2):
        assert body.callable_tools is not None
        tools = body.callable_tools.tools
        assert made.unheld(tools) is None
        made.calls_lark(tools, parallel=True, schema=CALL_SCHEMA)
        made.call_schemas(tools)
    assert len(taken_apart) == 1
