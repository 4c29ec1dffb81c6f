"""Where chat templates run: jinja2's immutable sandbox, in which no single step makes more than it may.

A template comes with its model, and what it multiplies may come from a client. Operators, joins, methods and filters that make
much of little are weighed before they run (`router.templates.sizes`); a method of a plain value that is neither weighed nor known
to be harmless cannot be called.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, NoReturn

from jinja2 import filters
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Concat, Node
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_environment
from markupsafe import escape

from router.templates import sizes
from router.templates.sizes import TemplateSizeError

MAX_MADE_FOLD = 32
"""How often over a template may make the longest text that it may make, until its rendering is over."""

_BINOP_SIZES: dict[str, Callable[[Any, Any], int]] = {
    "*": sizes.product,
    "**": sizes.power,
    "%": sizes.filled,
    "+": lambda left, right: sizes.length(left) + sizes.length(right),
}

_METHOD_SIZES: dict[str, Callable[..., int]] = {
    "center": sizes.padded,
    "expandtabs": sizes.untabbed,
    "join": sizes.joined,
    "ljust": sizes.padded,
    "replace": sizes.replaced,
    "rjust": sizes.padded,
    "zfill": sizes.padded,
}
_PLAIN = (str, bytes, int, float, list, tuple, dict)
_HARMLESS_METHODS = frozenset(
    [
        "bit_length",
        "capitalize",
        "casefold",
        "copy",
        "count",
        "endswith",
        "find",
        "get",
        "index",
        "is_integer",
        "isalnum",
        "isalpha",
        "isascii",
        "isdecimal",
        "isdigit",
        "isidentifier",
        "islower",
        "isnumeric",
        "isprintable",
        "isspace",
        "istitle",
        "isupper",
        "items",
        "keys",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "rfind",
        "rindex",
        "rpartition",
        "rsplit",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "swapcase",
        "title",
        "upper",
        "values",
    ]
)


class _WeighingCode(CodeGenerator):
    """Code in which `~` asks the sandbox, as the other operators do by themselves."""

    def visit_Concat(self, node: Concat, frame: Frame) -> None:  # noqa: N802  # as jinja2 names it
        """Writes a call of `TemplateSandbox.text_of`."""
        self.write("environment.text_of((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment of one template. What is counted is counted per rendering: each has a `fresh` one.

    Args:
        max_chars: The longest text, or list, that may be made.
    """

    intercepted_binops = frozenset(_BINOP_SIZES)
    code_generator_class = _WeighingCode

    def __init__(self, max_chars: int) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            finalize=self._shown,
        )
        self._max_chars = max_chars
        self._made = 0
        self.filters = dict(FILTERS)
        self.globals |= GLOBALS
        del self.globals["lipsum"]

    def fresh(self) -> "TemplateSandbox":
        """The same environment for one more rendering."""
        fresh = self.overlay()
        fresh._made = 0
        return fresh

    def weigh(self, size: int) -> None:
        """Counts what is about to be made.

        Raises:
            TemplateSizeError: It is too much.
        """
        self._made += size
        if size > self._max_chars or self._made > MAX_MADE_FOLD * self._max_chars:
            raise TemplateSizeError(f"it makes more than {self._max_chars} characters")

    def concat(self, pieces: Iterable[str]) -> str:
        """Joins what a template, a macro or a block has written."""
        made: list[str] = []
        size = 0
        for piece in pieces:
            size += len(piece)
            if size > self._max_chars:
                self.weigh(size)
            made.append(piece)
        self.weigh(size)
        return "".join(made)

    def text_of(self, parts: tuple[Any, ...]) -> str:
        """Joins the operands of `~`."""
        self.weigh(sizes.written(parts))
        return "".join(map(str, parts))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Calculates, once the result was weighed."""
        self.weigh(_BINOP_SIZES[operator](left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Calls a method, once its result was weighed. The names are jinja2's: keywords may have any other."""
        if isinstance(__obj, BuiltinMethodType) or isinstance(
            getattr(__obj, "__self__", None), _PLAIN
        ):
            __self._weigh_method(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` of jinja2's sandbox, once its result was weighed."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def weighing(*args: Any, **kwargs: Any) -> str:
            self.weigh(sizes.formatted(value.__self__, *args, **kwargs))
            return wrapped(*args, **kwargs)

        return weighing

    def _weigh_method(self, method: Any, args: Any, kwargs: Any) -> None:
        size = _METHOD_SIZES.get(method.__name__)
        if size is not None:
            self.weigh(size(method.__self__, *args, **kwargs))
        elif method.__name__ not in _HARMLESS_METHODS:
            raise TemplateSizeError(f"{method.__name__} cannot be called here")

    def _shown(self, value: Any) -> Any:
        """What `{{ }}` is about to write; the text that it becomes is counted by `concat`."""
        if not isinstance(value, str) and sizes.written(value) > self._max_chars:
            raise TemplateSizeError(f"it makes more than {self._max_chars} characters")
        return value


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
