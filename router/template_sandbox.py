"""Where chat templates run: jinja2's immutable sandbox, in which no single step makes more than it may.

A template comes with its model, and what it multiplies may come from a client. Operators, joins, methods and filters that make
much of little are weighed before they run (`router.template_sizes`); a method of a plain value that is neither weighed nor known
to be harmless cannot be called.
"""

from collections.abc import Callable, Iterable
from types import BuiltinMethodType
from typing import Any

from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import loopcontrols
from jinja2.nodes import Concat
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router import template_sizes as sizes
from router.template_filters import FILTERS, GLOBALS, GenerationTag
from router.template_sizes import TemplateSizeError

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
