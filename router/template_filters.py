"""Filters, globals and the one tag that chat templates find in their sandbox (`router.template_sandbox`).

Those of jinja2 that make no more than they are given, those that are weighed first, and what transformers adds for chat
templates. Filters that no chat template needs and that would have to be weighed are not there.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import filters
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.utils import Namespace, pass_environment
from markupsafe import escape

from router import template_sizes as sizes
from router.template_sizes import TemplateSizeError

if TYPE_CHECKING:
    from router.template_sandbox import TemplateSandbox

_MAX_PRECISION = 300
_MAX_INDENT = 64

_HARMLESS = (
    *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "filesizeformat", "first"),
    *("float", "groupby", "int", "items", "last", "length", "list", "lower", "map", "max", "min"),
    *("random", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "sort"),
    *("striptags", "title", "trim", "truncate", "unique", "upper", "urlencode", "wordcount"),
)


@pass_environment
def _batch(
    sandbox: "TemplateSandbox", value: Iterable[Any], linecount: int, fill_with: Any = None
) -> Iterator[list[Any]]:
    sandbox.weigh(linecount)
    return filters.do_batch(value, linecount, fill_with)


@pass_environment
def _center(sandbox: "TemplateSandbox", value: Any, width: int = 80) -> str:
    text = _string(sandbox, value)
    sandbox.weigh(sizes.padded(text, width))
    return text.center(width)


@pass_environment
def _escape(sandbox: "TemplateSandbox", value: Any) -> str:
    return str(escape(_string(sandbox, value)))


@pass_environment
def _format(sandbox: "TemplateSandbox", value: Any, *args: Any, **kwargs: Any) -> str:
    text = _string(sandbox, value)
    sandbox.weigh(sizes.filled(text, kwargs or args))
    return text % (kwargs or args)


@pass_environment
def _indent(
    sandbox: "TemplateSandbox",
    value: Any,
    width: int | str = 4,
    first: bool = False,
    blank: bool = False,
) -> str:
    text = _string(sandbox, value)
    step = sizes.padded("", width) if isinstance(width, int) else len(width)
    sandbox.weigh(len(text) + (1 + len(text.splitlines())) * step)
    return filters.do_indent(text, width, first, blank)


@pass_environment
def _join(
    sandbox: "TemplateSandbox", value: Iterable[Any], d: str = "", attribute: str | None = None
) -> str:
    read = filters.make_attrgetter(sandbox, attribute) if attribute is not None else None
    parts = [part if read is None else read(part) for part in value]
    sandbox.weigh(sizes.joined(d, parts))
    return str(d).join(map(str, parts))


@pass_environment
def _replace(
    sandbox: "TemplateSandbox", value: Any, old: str, new: str, count: int | None = None
) -> str:
    text = _string(sandbox, value)
    sandbox.weigh(sizes.replaced(text, str(old), str(new)))
    return text.replace(str(old), str(new), -1 if count is None else count)


def _round(value: float, precision: int = 0, method: str = "common") -> float:
    if abs(precision) > _MAX_PRECISION:
        raise TemplateSizeError(f"a number is rounded to more than {_MAX_PRECISION} places")
    return filters.do_round(value, precision, method)  # type: ignore[arg-type]  # checks it itself


@pass_environment
def _string(sandbox: "TemplateSandbox", value: Any) -> str:
    if isinstance(value, str):
        return value
    sandbox.weigh(sizes.written(value))
    return str(value)


@pass_environment
def _sum(
    sandbox: "TemplateSandbox",
    value: Iterable[Any],
    attribute: str | int | None = None,
    start: Any = 0,
) -> Any:
    if not isinstance(start, int | float):
        raise TemplateSizeError("only numbers are summed up here")
    return filters.sync_do_sum(sandbox, value, attribute, start)


@pass_environment
def _tojson(
    sandbox: "TemplateSandbox",
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: plain JSON, without HTML's escapes."""
    step = len(indent) if isinstance(indent, str) else indent or 0
    if max(step, *map(len, separators or ("", ""))) > _MAX_INDENT:
        raise TemplateSizeError(f"JSON is spaced by more than {_MAX_INDENT} characters")
    sandbox.weigh(sizes.written(value))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


FILTERS: Mapping[str, Callable[..., Any]] = {
    **{name: filters.FILTERS[name] for name in _HARMLESS},
    "batch": _batch,
    "center": _center,
    "e": _escape,
    "escape": _escape,
    "forceescape": _escape,
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "safe": _string,
    "string": _string,
    "sum": _sum,
    "tojson": _tojson,
}


class _Namespace(Namespace):
    """Takes no names that begin with an underscore, by which a template could reach the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as jinja2's: `self` may be a name
        self, *given = args
        named = dict(*given, **kwargs)
        for name in named:
            _check_name(name)
        Namespace.__init__(self, named)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name[:40]!r}")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    sizes.timed(form)
    return datetime.now().strftime(form)  # local time is what templates mean


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


GLOBALS: Mapping[str, Callable[..., Any]] = {
    "dict": _dict,
    "namespace": _Namespace,
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}


class GenerationTag(Extension):
    """`{% generation %}` marks what the assistant said, for who trains a model; here it is written as it is."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it

    def parse(self, parser: Parser) -> Node:
        """The block's own content."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Callable[[], str]) -> str:
        return caller()
