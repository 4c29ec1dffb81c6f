"""What each family's models write is taken apart, wherever its text is cut."""

import json
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.fields import JsonObject
from router.parsing.events import (
    ContentText,
    ParsedEvent,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegun,
    ToolCallEnded,
)
from router.parsing.families import REASONING_FAMILIES, TOOL_FAMILIES
from router.parsing.output_format import OutputFormat, ToolSchema

TOOLS = [
    ToolSchema(
        name="get_weather",
        parameters={
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    ),
    ToolSchema(name="now", parameters={"type": "object"}),
]
PARIS = {"city": "Paris", "days": 2}
ODD = {"city": 'a "quoted" {brace} ] \\ <tool_call> 你好', "days": 1}


@dataclass
class Said:
    """What events say, all together."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]

    def arguments(self) -> list[object]:
        return [json.loads(arguments) for _, arguments in self.calls]


def said(events: Sequence[ParsedEvent]) -> Said:
    found = Said("", "", [])
    for event in events:
        match event:
            case ContentText():
                found.content += event.text
            case ReasoningText():
                found.reasoning += event.text
            case ToolCallBegun():
                assert event.index == len(found.calls)
                found.calls.append((event.name, ""))
            case ToolCallArguments():
                assert event.index == len(found.calls) - 1
                name, text = found.calls[-1]
                found.calls[-1] = (name, text + event.text)
    return found


def output_format(tools: str | None, reasoning: str | None, *, as_tokens: bool) -> OutputFormat:
    family = TOOL_FAMILIES[tools] if tools else None
    thought = REASONING_FAMILIES[reasoning] if reasoning else None
    marks = [*(family.marks if family else ()), *(thought.marks if thought else ())]
    ids = {mark: 1000 + place for place, mark in enumerate(marks)} if as_tokens else {}
    return OutputFormat(tools=family, reasoning=thought, marker_ids=ids)


def parsed(
    made: OutputFormat,
    text: str,
    cuts: Sequence[int] = (),
    *,
    in_reasoning: bool = False,
    tools: Sequence[ToolSchema] = TOOLS,
    cut_off: bool = True,
) -> Said:
    """With marks that are tokens told by their ids, and the text between them cut at some places;
    what need not be pushed is not.
    """
    parser = made.parser(tools, in_reasoning=in_reasoning)
    events: list[ParsedEvent] = []
    pieces: list[str | int] = [text]
    for mark, token in made.marker_ids.items():
        split: list[str | int] = []
        for piece in pieces:
            if isinstance(piece, int):
                split.append(piece)
                continue
            for place, part in enumerate(piece.split(mark)):
                split += [token, part] if place else [part]
        pieces = split
    spelt = {token: mark for mark, token in made.marker_ids.items()}
    at = 0
    for piece in pieces:
        if isinstance(piece, int):
            check_places(made, text, parser.settled, gained := parser.push_marker(piece))
            events += gained
            at += len(spelt[piece])
            continue
        ends = sorted({0, len(piece), *(cut % (len(piece) + 1) for cut in cuts)})
        for begin, end in pairwise(ends):
            part, settled = piece[begin:end], parser.settled
            match parser.plain_kind(part):
                case None:
                    gained = parser.push_text(part)
                case kind:
                    gained = [ContentText(part, at) if kind is ContentText else ReasoningText(part)]
            check_places(made, text, settled, gained)
            events += gained
            at += end - begin
    check_places(made, text, parser.settled, gained := parser.finish(cut_off=cut_off))
    assert parser.settled == len(text)
    return said([*events, *gained])


def check_places(
    made: OutputFormat, text: str, settled: int, gained: Sequence[ParsedEvent]
) -> None:
    """Content stands where it says that it begins, and what was settled before holds none of it. Between messages of
    Harmony there is a line break that nobody wrote.
    """
    for event in gained:
        if isinstance(event, ContentText):
            begin, end = event.begin, event.begin + len(event.text)
            begin += made.is_harmony and text[begin:end] != event.text
            assert event.text.endswith(text[begin:end])
            assert len(event.text) - (end - begin) <= made.is_harmony
            assert settled <= begin
            settled = end


def hermes(*calls: tuple[str, object]) -> str:
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': n, 'arguments': a}, ensure_ascii=False)}\n</tool_call>"
        for n, a in calls
    )


def deepseek_v3(*calls: tuple[str, object]) -> str:
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{json.dumps(a)}\n```<｜tool▁call▁end｜>"
        for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def deepseek_v31(*calls: tuple[str, object]) -> str:
    written = "".join(
        f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{json.dumps(a)}<｜tool▁call▁end｜>"
        for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def qwen3_coder(*calls: tuple[str, dict[str, object]]) -> str:
    def parameters(arguments: dict[str, object]) -> str:
        return "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())

    return "\n".join(
        f"<tool_call>\n<function={n}>\n{parameters(a)}</function>\n</tool_call>" for n, a in calls
    )


def harmony(*calls: tuple[str, object]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{json.dumps(a)}<|call|>"
        for n, a in calls
    )


TWO = (("get_weather", PARIS), ("get_weather", {"city": "Oslo", "days": 3}))
LLAMA = "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in TWO)
MISTRAL = "[TOOL_CALLS]" + json.dumps([{"name": n, "arguments": a} for n, a in TWO])
MISTRAL_NAMED = "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in TWO)
MISTRAL_IDS = "".join(f"[TOOL_CALLS]{n}[CALL_ID]a1B2c3D4e[ARGS]{json.dumps(a)}" for n, a in TWO)
PYTHONIC = "[" + ", ".join(f"{n}(city={a['city']!r}, days={a['days']})" for n, a in TWO) + "]"
OUTPUTS = {
    "hermes": ("hermes", hermes(*TWO)),
    "hermes after text": ("hermes", "I look it up.\n\n" + hermes(*TWO) + "\n"),
    "qwen3_coder": ("qwen3_coder", qwen3_coder(*TWO)),
    "llama3_json": ("llama3_json", LLAMA),
    "llama3_json marked": ("llama3_json", "<|python_tag|>" + LLAMA),
    "mistral": ("mistral", MISTRAL),
    "mistral by name": ("mistral", MISTRAL_NAMED),
    "mistral with ids": ("mistral", MISTRAL_IDS),
    "mistral without marks": ("mistral", MISTRAL_NAMED.replace("[ARGS]", "")),
    "openai": ("openai", harmony(*TWO)),
    "openai after text": (
        "openai",
        "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant" + harmony(*TWO),
    ),
    "openai with recipients first": (
        "openai",
        " to=functions.get_weather<|channel|>commentary json<|message|>"
        + json.dumps(PARIS)
        + "<|call|><|start|>assistant to=get_weather<|channel|>commentary<|message|>"
        + json.dumps(TWO[1][1]),
    ),
    "pythonic": ("pythonic", PYTHONIC),
    "pythonic in lines": ("pythonic", " " + PYTHONIC.replace("(", "(\n  ").replace(")", ",\n)")),
    "llama4_pythonic": ("llama4_pythonic", PYTHONIC),
    "llama4_pythonic marked": (
        "llama4_pythonic",
        f"<|python_start|>{PYTHONIC}<|python_end|>",
    ),
    "deepseek_v3": ("deepseek_v3", deepseek_v3(*TWO)),
    "deepseek_v3 without section": (
        "deepseek_v3",
        deepseek_v3(*TWO)
        .removeprefix("<｜tool▁calls▁begin｜>")
        .removesuffix("<｜tool▁calls▁end｜>"),
    ),
    "deepseek_v31 without section": (
        "deepseek_v31",
        "Well. " + deepseek_v31(*TWO).removeprefix("<｜tool▁calls▁begin｜>"),
    ),
    "deepseek_v31": ("deepseek_v31", "Well. " + deepseek_v31(*TWO)),
}
CUTS = st.lists(st.integers(0, 400), max_size=60)


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("output", OUTPUTS)
@given(cuts=CUTS)
def test_two_calls_are_found_wherever_the_text_is_cut(
    output: str, as_tokens: bool, cuts: list[int]
) -> None:
    family, text = OUTPUTS[output]
    made = output_format(family, None, as_tokens=as_tokens)
    found = parsed(made, text, cuts)
    assert [name for name, _ in found.calls] == ["get_weather", "get_weather"]
    assert found.arguments() == [PARIS, {"city": "Oslo", "days": 3}]
    assert found == parsed(made, text)
    assert found.content in ("", "I look it up.", "Well.")
    assert not found.reasoning


@pytest.mark.parametrize("output", OUTPUTS)
def test_every_single_cut_gives_the_same(output: str) -> None:
    family, text = OUTPUTS[output]
    made = output_format(family, None, as_tokens=False)
    whole = parsed(made, text)
    assert all(parsed(made, text, [cut]) == whole for cut in range(len(text)))
    assert parsed(made, text, range(len(text))) == whole


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("output", OUTPUTS)
def test_names_may_be_as_long_as_those_of_tools_are_taken(output: str, as_tokens: bool) -> None:
    family, text = OUTPUTS[output]
    made = output_format(family, None, as_tokens=as_tokens)
    tools = [ToolSchema(name="n" * 128, parameters=TOOLS[0].parameters)]
    found = parsed(made, text.replace("get_weather", tools[0].name), range(2000), tools=tools)
    assert [name for name, _ in found.calls] == [tools[0].name] * 2
    assert found.arguments() == [PARIS, {"city": "Oslo", "days": 3}]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("mistral", "[TOOL_CALLS] {} [ARGS]{{}}"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜> {} \n```json\n{{}}\n```"),
        ("deepseek_v31", "<｜tool▁call▁begin｜> {}\n<｜tool▁sep｜>{{}}"),
        ("qwen3_coder", "<tool_call><function= {} ></function></tool_call>"),
    ],
)
def test_blanks_around_a_name_do_not_count_as_a_part_of_it(family: str, text: str) -> None:
    made = output_format(family, None, as_tokens=True)
    assert parsed(made, text.format("n" * 128)).calls == [("n" * 128, "{}")]
    assert not parsed(made, text.format("n" * 129)).calls


@given(text=st.text(st.sampled_from('<>/tool_cal{}"name:[]ARGS\\ \n｜▁;'), max_size=80), cuts=CUTS)
@pytest.mark.parametrize("family", TOOL_FAMILIES)
def test_what_is_no_call_is_cut_as_one_likes_too(family: str, text: str, cuts: list[int]) -> None:
    made = output_format(family, "qwen3", as_tokens=False)
    assert parsed(made, text, cuts) == parsed(made, text)


PIECES = st.sampled_from(
    [
        *"[](){}<>\"'\\,:=;* \n",
        *("now", "get_weather", "city", "name", "arguments", "x", "-1.5e3", "\\u", "d83d", "null"),
        *('{"name": "now", "arguments": {', "[now(", "[now(x=", "<function=now>", "<parameter=x>"),
        *("<function=get_weather>", "\n<parameter=city>", "\n<parameter=days>", "</parameter>"),
        "\n</function>",
        *("assistant", "analysis", "final", " to=functions.now", " to=now"),
        *("\n```json\n", "function", "<think>", "</think>", "**{", '"' * 3, "True"),
    ]
)


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("family", TOOL_FAMILIES)
@given(data=st.data())
def test_whatever_a_model_writes_is_taken_apart_the_same_way(
    family: str, as_tokens: bool, data: st.DataObject
) -> None:
    marks = TOOL_FAMILIES[family].marks
    pieces = st.one_of(PIECES, st.sampled_from(marks)) if marks else PIECES
    text = "".join(data.draw(st.lists(pieces, max_size=30)))
    reasoning = "openai_gptoss" if family == "openai" else "qwen3"
    made = output_format(family, reasoning, as_tokens=as_tokens)
    inside, cut_off = data.draw(st.booleans()), data.draw(st.booleans())
    cut = parsed(made, text, data.draw(CUTS), in_reasoning=inside, cut_off=cut_off)
    assert cut == parsed(made, text, in_reasoning=inside, cut_off=cut_off)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'it\\'s \"so\"'", 'it\'s "so"'),
        ('"a\\n\\x41\\u00e9\\U0001f600\\d"', "a\nA\u00e9\U0001f600\\d"),
        ('"\\ud83d\\ude00"', "\U0001f600"),
        ('"\\udc80 \\ud83dx"', "\ufffd \ufffdx"),
        ("''", ""),
        ('"""a "b"\nc"""', 'a "b"\nc'),
        ("True", True),
        ("false", False),
        ("None", None),
        ("-3", -3),
        ("1_000", 1000),
        ("0x1f", 31),
        ("+.5", 0.5),
        ("1e3", 1000.0),
        ("[1, [], 'a',]", [1, [], "a"]),
        ("(1, 2)", [1, 2]),
        ("{'a': {'b': [None]}, \"c\": 1}", {"a": {"b": [None]}, "c": 1}),
        ("[" * 60 + "]" * 60, json.loads("[" * 60 + "]" * 60)),
    ],
)
def test_literals_of_python_become_json(written: str, value: object) -> None:
    made = output_format("pythonic", None, as_tokens=False)
    text = f"[get_weather(city={written})]"
    found = parsed(made, text)
    assert found.arguments() == [{"city": value}]
    assert parsed(made, text, range(len(text))) == found
    assert parsed(made, f"[get_weather(**{{'city': {written}}})]").arguments() == [{"city": value}]


@pytest.mark.parametrize(
    "written",
    [
        *("Paris", "1 + 1", "'a", "[1}", "{1: 2}", "{'a'}", "inf", "[" * 100_000, "9" * 10_000),
        *("1, city=2", "'a' 'b'", "", "{**x}"),
    ],
)
def test_what_is_no_literal_breaks_a_call_off(written: str) -> None:
    parser = output_format("pythonic", None, as_tokens=False).parser(TOOLS, in_reasoning=False)
    events = [*parser.push_text(f"[get_weather(city={written})] and more"), *parser.finish()]
    assert any(isinstance(event, ToolCallBegun) for event in events)
    assert not any(isinstance(event, ToolCallEnded) for event in events)


@pytest.mark.parametrize("value", ['{"a": [1}', '{"a": 1]', '[{"a": 1]'])
def test_a_bracket_that_another_kind_closes_breaks_a_call_off(value: str) -> None:
    parser = output_format("hermes", None, as_tokens=False).parser(TOOLS, in_reasoning=False)
    text = f'<tool_call>{{"name": "now", "arguments": {value}, "x": {{}}}}</tool_call>'
    events = [*parser.push_text(text), *parser.finish()]
    assert not any(isinstance(event, ToolCallEnded) for event in events)


@given(cuts=CUTS)
def test_arguments_may_hold_anything_that_json_does(cuts: list[int]) -> None:
    made = output_format("hermes", None, as_tokens=True)
    found = parsed(output_format("hermes", None, as_tokens=False), hermes(("now", PARIS)), cuts)
    assert found.calls == [("now", json.dumps(PARIS))]
    parser = made.parser(TOOLS, in_reasoning=False)
    events = [*parser.push_marker(1000)]
    text = json.dumps({"name": "get_weather", "arguments": ODD}, ensure_ascii=False)
    for begin in range(len(text)):
        events += parser.push_text(text[begin : begin + 1])
    events += [*parser.push_marker(1001), *parser.finish()]
    assert said(events).arguments() == [ODD]


def test_a_name_may_come_behind_the_arguments_and_they_may_be_a_text() -> None:
    made = output_format("hermes", None, as_tokens=False)
    late = '<tool_call>{"arguments": {"x": 1}, "name": "now"}</tool_call>'
    assert parsed(made, late).calls == [("now", '{"x": 1}')]
    quoted = '<tool_call>{"name": "now", "arguments": "{\\"x\\": 1}"}</tool_call>'
    assert parsed(made, quoted).calls == [("now", '{"x": 1}')]
    none = '<tool_call>{"name": "now"}</tool_call>'
    assert parsed(made, none).calls == [("now", "{}")]


def test_text_between_and_behind_calls_is_content() -> None:
    made = output_format("hermes", None, as_tokens=False)
    one = hermes(("now", {}))
    found = parsed(made, f"First {one} then {one} done.")
    assert [name for name, _ in found.calls] == ["now", "now"]
    assert found.content == "First then done."


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "<tool_call> is how calls begin"),
        ("hermes", '<tool_call>{"no": "name"}</tool_call>'),
        ("hermes", "if a <b: <tool"),
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", '{"name": "nobody", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS] but none"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>nothing"),
        ("qwen3_coder", "<tool_call>\nno function"),
        ("qwen3_coder", "so <function=nobody>\n<parameter=x>\n1\n</parameter>\n</function>"),
        ("qwen3_coder", "`<function=now>` is how now is called"),
        ("qwen3_coder", "<function= now >\n</function>"),
        ("qwen3_coder", "<function=now>"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>" + "x" * 1000),
        ("mistral", "[TOOL_CALLS]now[CALL_ID]" + "x" * 1000),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[now] is a list"),
        ("pythonic", "[nobody(x=1)]"),
        ("pythonic", "[get_weather('Paris')]"),
        ("pythonic", "see [now()]"),
        ("llama4_pythonic", "<|python_start|>print(1)<|python_end|>"),
    ],
)
def test_what_begins_like_a_call_and_is_none_is_content(family: str, text: str) -> None:
    found = parsed(output_format(family, None, as_tokens=False), text)
    assert (found.content, found.calls) == (text, [])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"na<|python_tag|>me": "now", "parameters": {}}', []),
        ('{"name": "<|python_tag|>now", "parameters": {}}', []),
        (
            '<|python_tag|>{"x<|python_tag|>": 1, "name": "now", "parameters": {}}',
            [("now", "{}")],
        ),
        (
            '<|python_tag|>{"parameters": "{\\"x\\": \\"<|python_tag|>\\"}", "name": "now"}',
            [("now", '{"x": "<|python_tag|>"}')],
        ),
    ],
)
def test_a_mark_that_is_a_token_may_stand_within_a_text_of_json(
    text: str, calls: list[tuple[str, str]]
) -> None:
    found = parsed(output_format("llama3_json", None, as_tokens=True), text)
    assert found.calls == calls
    assert found.content == ("" if calls else text)


def test_a_call_that_breaks_off_has_what_there_was_of_it() -> None:
    made = output_format("hermes", None, as_tokens=False)
    found = parsed(made, '<tool_call>{"name": "now", "arguments": {"city": "Par')
    assert found.calls == [("now", '{"city": "Par')]


@pytest.mark.parametrize("value", ["5", '"hi"', "[1]", '"{\\ud800}"', '"[1]"'])
def test_arguments_that_are_no_object_make_no_call(value: str) -> None:
    made = output_format("hermes", None, as_tokens=False)
    text = f'<tool_call>{{"name": "now", "arguments": {value}}}</tool_call>'
    assert not parsed(made, text).calls
    assert '"now"' in parsed(made, text).content


def test_only_a_call_that_is_whole_has_an_end() -> None:
    for family, text in (
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1'),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{"),
        ("qwen3_coder", "<tool_call><function=now><parameter=a>[1"),
    ):
        parser = output_format(family, None, as_tokens=False).parser(TOOLS, in_reasoning=False)
        events = [*parser.push_text(text), *parser.finish()]
        assert any(isinstance(event, ToolCallBegun) for event in events)
        assert not any(isinstance(event, ToolCallEnded) for event in events)


@pytest.mark.parametrize("value", ["[" * 100_000, "NaN"])
def test_parameters_that_are_no_json_are_texts(value: str) -> None:
    made = output_format("qwen3_coder", None, as_tokens=False)
    text = (
        "<tool_call><function=get_weather><parameter=days>"
        f"{value}</parameter><parameter=days>1</parameter></function></tool_call>"
    )
    assert parsed(made, text).arguments() == [{"days": value}]


CITY = "<parameter=city>\nOslo"
DAYS = "<parameter=days>\n3"


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("mark", ["<tool_call>\n", ""], ids=["marked", "bare"])
@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        (f"{CITY}\n</parameter>\n{DAYS}\n</parameter>\n</function>\n</tool_call>", [{"city": "Oslo", "days": 3}]),
        (f"{CITY}\n{DAYS}\n</parameter>\n</function>\n</tool_call>", [{"city": "Oslo", "days": 3}]),
        (f"{DAYS}\n{CITY}\n\n</function>\n\n</tool_call>", [{"days": 3, "city": "Oslo\n"}]),
        (f"{CITY}\n</tool_call>", [{"city": "Oslo"}]),
        (f"{CITY}\n</function>\n<tool_call>\n<function=now>\n</function>\n</tool_call>", [{"city": "Oslo"}, {}]),
        (f"{CITY}\n</parameter>\n</function>\n<function=now>\n</function>\n</tool_call>", [{"city": "Oslo"}, {}]),
        (f"{CITY}\n</function>", [{"city": "Oslo"}]),
        (f"{CITY}\n", [{"city": "Oslo"}]),
        (f"{CITY}\n{DAYS}\n</parameter>\n</fun", [{"city": "Oslo", "days": 3}]),
        (f"{CITY}\n<parameter=days", [{"city": "Oslo\n<parameter=days"}]),
        (f"{CITY}\n</parameter>\n<parameter=days", [{"city": "Oslo"}]),
    ],
)  # fmt: skip
def test_tags_that_models_leave_out_end_a_call_all_the_same(
    written: str, arguments: list[object], mark: str, as_tokens: bool
) -> None:
    made = output_format("qwen3_coder", None, as_tokens=as_tokens)
    text = f"I look.\n\n{mark}<function=get_weather>\n{written}"
    found = parsed(made, text, cut_off=False)
    assert (found.content, found.arguments()) == ("I look.", arguments)
    assert all(parsed(made, text, [cut], cut_off=False) == found for cut in range(len(text)))


@pytest.mark.parametrize(
    "value",
    [
        "a\n</function>\nb",
        "a\n</tool_call>\nb",
        "a\n<parameter=other>\nb",
        "a\n<parameter=city>\nb",
        "a <parameter=days>b</function></tool_call>",
        "a\n</function>\n<function=now>\nb",
    ],
)
def test_lines_of_a_value_that_end_no_call_are_its_own(value: str) -> None:
    made = output_format("qwen3_coder", None, as_tokens=False)
    text = qwen3_coder(("get_weather", {"city": value, "days": 3}))
    found = parsed(made, text, range(len(text)))
    assert (found.content, found.arguments()) == ("", [{"city": value, "days": 3}])


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize(
    "said", ["Calls begin with `<function=`.", "So: <function= a, <function=now"]
)
def test_what_follows_a_mention_of_a_call_is_read_as_ever(said: str, as_tokens: bool) -> None:
    made = output_format("qwen3_coder", "qwen3", as_tokens=as_tokens)
    text = f"{said}\n<think>hm</think>\n{qwen3_coder(('now', {}))}"
    for cuts in (range(0), range(len(text))):
        found = parsed(made, text, cuts)
        assert (found.content.strip(), found.reasoning, found.arguments()) == (said, "hm", [{}])


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("Oslo</function></tool_call>", ""),
        ("Oslo\n</tool_call>\n\nDone.", ""),
        ("Oslo\n</function>\n\nDone.", ""),
        ("Oslo\n</function>\n<parameter=days>\n3\n</parameter>\n</function>", '{"city": "Oslo", "days": 3}'),
    ],
)  # fmt: skip
def test_a_value_that_ran_over_the_calls_end_is_none(written: str, arguments: str) -> None:
    made = output_format("qwen3_coder", None, as_tokens=False)
    text = f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{written}"
    for cuts in (range(0), range(len(text))):
        found = parsed(made, text, cuts, cut_off=False)
        assert (found.content, found.calls) == ("", [("get_weather", arguments)])


def test_a_line_within_quotes_ends_no_value_that_is_json() -> None:
    made = output_format("qwen3_coder", None, as_tokens=False)
    schema: JsonObject = {"type": "object", "properties": {"a": {"type": "array"}, "b": {}}}
    value = '["\n<parameter=b>\n</function>\n</tool_call>"]'
    text = qwen3_coder(("now", {"a": value, "b": 3}))
    tools = [ToolSchema(name="now", parameters=schema)]
    assert parsed(made, text, tools=tools).arguments() == [{"a": value, "b": "3"}]


def test_a_parameter_that_is_cut_off_is_none_however_it_goes_on() -> None:
    made = output_format("qwen3_coder", None, as_tokens=True)
    text = f"<tool_call><function=get_weather>\n{CITY}\n</parameter>\n{DAYS}"
    for rest in ("", "\n", "\n</par", "\n</function"):
        assert parsed(made, text + rest).calls == [("get_weather", '{"city": "Oslo"')]
    for begun in ("<", "<param", "<parameter=da", "</func"):
        cut = text.replace(DAYS, begun)
        assert parsed(made, cut).calls == [("get_weather", '{"city": "Oslo"')]
        assert not parsed(made, cut).content


def test_text_that_merely_spells_a_mark_is_text_where_marks_are_tokens() -> None:
    made = output_format("hermes", "qwen3", as_tokens=True)
    parser = made.parser(TOOLS, in_reasoning=False)
    text = 'write <tool_call>{"name": "now"}</tool_call> or <think>'
    assert said([*parser.push_text(text), *parser.finish()]).content == text


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@given(cuts=CUTS)
def test_reasoning_is_told_apart(as_tokens: bool, cuts: list[int]) -> None:
    made = output_format("hermes", "qwen3", as_tokens=as_tokens)
    call = hermes(("now", {}))
    for text, inside in (
        (f"<think>hm\n</think>\n\n{call}", False),
        (f"hm\n</think>\n\n{call}", True),
    ):
        found = parsed(made, text, cuts, in_reasoning=inside)
        assert (found.reasoning, found.content) == ("hm\n", "")
        assert found.calls == [("now", "{}")]
    plain = parsed(made, "hm</think>The answer. ", cuts, in_reasoning=True)
    assert (plain.reasoning, plain.content) == ("hm", "The answer. ")


ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (ANALYSIS + FINAL + "It rains.<|return|>", "hm", "It rains.", []),
        (ANALYSIS + ANALYSIS + FINAL + "It rains. ", "hm\nhm", "It rains. ", []),
        (ANALYSIS + harmony(("now", {})), "hm", "", [("now", "{}")]),
        (ANALYSIS + FINAL + "a<|end|><|start|>assistant" + FINAL + "b", "hm", "a\nb", []),
        (FINAL + "a <|start|>assistant" + FINAL + "b<|channel|>final<|message|>c", "", "a \nb\nc", []),
        ("no header<|return|>", "", "no header", []),
        ("", "", "", []),
        ("<|channel|>anal", "", "", []),
        ("<|channel|>analysis<|message|>hm", "hm", "", []),
        ("<|channel|>commentary to=functions.now<|message|><|call|>", "", "", [("now", "{}")]),
        ("<|channel|>commentary to=functions.now<|message|>{\"a\": ", "", "", [("now", '{"a": ')]),
        ("<|channel|>commentary to=functions.now<|message|>none<|call|>", "", "none", []),
        ("<|channel|>analysis to=python<|message|>print(1)<|call|>", "print(1)", "", []),
        ("<|channel|>commentary to=python<|message|>print(1)<|call|>", "", "print(1)", []),
        ("<|channel|>" + "x" * 600 + "<|message|>y", "", "<|channel|>" + "x" * 600 + "<|message|>y", []),
    ],
)  # fmt: skip
def test_messages_of_harmony_are_told_by_their_channel(
    text: str, reasoning: str, content: str, calls: list[tuple[str, str]], as_tokens: bool
) -> None:
    made = output_format("openai", "openai_gptoss", as_tokens=as_tokens)
    found = parsed(made, text)
    assert (found.reasoning, found.content, found.calls) == (reasoning, content, calls)
    assert all(parsed(made, text, [cut]) == found for cut in range(len(text)))
    assert parsed(made, text, range(len(text))) == found


def test_harmony_without_tools_or_reasoning_is_content() -> None:
    made = output_format("openai", None, as_tokens=True)
    assert parsed(made, ANALYSIS + FINAL + "42").content == "hm\n42"
    parser = output_format("openai", "openai_gptoss", as_tokens=False).parser(
        None, in_reasoning=True
    )
    text = "so<|end|><|start|>assistant" + harmony(("now", {}))
    found = said([*parser.push_text(text), *parser.finish()])
    assert (found.reasoning, found.content, found.calls) == ("so", "{}", [])


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("output", ["llama3_json", "pythonic", "llama4_pythonic"])
def test_calls_that_are_all_of_an_answer_are_found_behind_reasoning(
    output: str, as_tokens: bool
) -> None:
    family, text = OUTPUTS[output]
    made = output_format(family, "qwen3", as_tokens=as_tokens)
    for whole, inside in ((f"<think>hm</think>\n\n{text}", False), (f"hm</think>{text}", True)):
        found = parsed(made, whole, in_reasoning=inside)
        assert (found.reasoning, found.content, len(found.calls)) == ("hm", "", 2)
        assert parsed(made, whole, range(len(whole)), in_reasoning=inside) == found
    later = f"Well. <think>hm</think>{text}"
    assert not parsed(made, later).calls


@given(pieces=st.lists(PIECES, max_size=40))
def test_arguments_in_python_that_are_whole_are_json(pieces: list[str]) -> None:
    parser = output_format("pythonic", None, as_tokens=False).parser(TOOLS, in_reasoning=False)
    text = f"[get_weather(city={''.join(pieces)})]"
    arguments: dict[int, str] = {}
    for event in [*parser.push_text(text), *parser.finish()]:
        if isinstance(event, ToolCallArguments):
            arguments[event.index] = arguments.get(event.index, "") + event.text
        if isinstance(event, ToolCallEnded):
            assert isinstance(json.loads(arguments[event.index]), dict)


def test_calls_within_reasoning_are_reasoning() -> None:
    made = output_format("hermes", "qwen3", as_tokens=True)
    call = hermes(("now", {}))
    found = parsed(made, f"I could {call}</think>No.", in_reasoning=True)
    assert (found.reasoning, found.content, found.calls) == (f"I could {call}", "No.", [])


def test_without_tools_calls_are_text() -> None:
    made = output_format("hermes", None, as_tokens=False)
    parser = made.parser(None, in_reasoning=False)
    text = hermes(("now", {}))
    assert said([*parser.push_text(text), *parser.finish()]).content == text


def test_text_that_can_mean_nothing_else_need_not_be_pushed() -> None:
    parser = output_format("hermes", "qwen3", as_tokens=False).parser(TOOLS, in_reasoning=True)
    kinds = []
    for text in (
        "hm",
        " so",
        " <",
        "b",
        " c",
        "</think>",
        "\n",
        "It",
        " rains",
        " \n",
        ".",
        " a",
        "b",
    ):
        kinds.append(parser.plain_kind(text))
        if kinds[-1] is None:
            parser.push_text(text)
    thought, content = ReasoningText, ContentText
    assert kinds == [None, thought, None, None, thought, None, None, None, content, None, None, content, content]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "before", "mark"), [("llama3_json", "", ""), ("hermes", "Well:", "<tool_call>")]
)
def test_where_unsettled_text_begins_is_told_without_reading_it_again(
    family: str, before: str, mark: str
) -> None:
    parser = output_format(family, None, as_tokens=False).parser(TOOLS, in_reasoning=False)
    parser.push_text(f'{before}{mark}{{"arguments": "' + "x" * 1_000_000)
    tracemalloc.start()
    try:
        settled, (_, most_bytes) = parser.settled, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert settled == len(before)
    assert most_bytes < 1000
