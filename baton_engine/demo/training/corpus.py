"""Questions and answers about the Python standard library, taken from the running interpreter.

The answer to "What does os.path.join do?" is the first sentence of
`inspect.getdoc(os.path.join)`. `baton_engine.demo.training.conversations` makes chats of these pairs.
"""

import importlib
import inspect
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from baton_engine.demo.training.names import NAMES

MAX_ANSWER_WORDS = 40
MIN_ANSWER_WORDS = 2
MIN_WORDS_BEHIND_ARROW = 4

# `max(iterable, *[, key=func]) -> value` and its like, with what follows on the same line.
_SIGNATURE = re.compile(
    r"@?[\w.]+\([^>]*?\)\s*(?P<arrow>-+>|--?|:|$)\s*(?:None\.|\w[.,])?\s*(?P<rest>.*)"
)
_SENTENCE_END = re.compile(
    r"(?<!\be\.g)(?<!\beg)(?<!\bi\.e)(?<!a\.k\.a)(?<!\betc)(?<!\bvs)(?<!\.\.)[.!?](?=\s)"
)
_NOT_PROSE = re.compile(r">>>|->|<==>|::|: - |\(self|^@|^async |\w = \w|^list R|[:,]$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One documented name: `os.path.join` and the first sentence of its docstring."""

    name: str
    answer: str

    @property
    def question(self) -> str:
        """The canonical phrasing, the one that the model must answer word for word."""
        return f"What does {self.name} do?"


def first_sentence(docstring: str) -> str | None:
    """The first sentence of a docstring on one line, or None where there is no short and clean one.

    A signature such as `max(iterable, *[, key=func]) -> value` is not a sentence. What stands
    behind its arrow is one if it ends like one; otherwise it will do only for want of prose below.
    """
    behind_arrow = None
    for paragraph in re.split(r"\n\s*\n", docstring.strip()):
        lines = [line.strip() for line in paragraph.splitlines()]
        signature = _SIGNATURE.fullmatch(lines[0])
        if not signature:
            return _opening_sentence(lines) or behind_arrow
        more = itertools.takewhile(lambda line: not _SIGNATURE.fullmatch(line), lines[1:])
        found = _opening_sentence([signature["rest"], *more])
        if found and found.endswith("."):
            return found
        if found and len(found.split()) >= MIN_WORDS_BEHIND_ARROW:
            behind_arrow = behind_arrow or found
    return behind_arrow


def _opening_sentence(lines: list[str]) -> str | None:
    text = " ".join(" ".join(lines).split())
    end = _SENTENCE_END.search(text)
    sentence = (text[: end.end()] if end else text).rstrip("\\")
    is_short = MIN_ANSWER_WORDS <= len(sentence.split()) <= MAX_ANSWER_WORDS
    is_clean = sentence.isascii() and not _NOT_PROSE.search(sentence)
    return sentence if is_short and is_clean else None


def entries() -> list[Entry]:
    """Every name of `NAMES` that this interpreter can answer for, in the order given there."""
    return list(_entries())


def _entries() -> Iterator[Entry]:
    for prefix, names in NAMES.items():
        for name in names.split():
            full_name = f"{prefix}.{name}" if prefix else name
            found = _resolve(full_name)
            docstring = inspect.getdoc(found) if found is not None else None
            answer = first_sentence(docstring) if docstring else None
            if answer:
                yield Entry(name=full_name, answer=answer)


def _resolve(full_name: str) -> object | None:
    """The object called `full_name`: the longest importable prefix is its module."""
    parts = full_name.split(".")
    for num_module_parts in range(len(parts) - 1, -1, -1):
        try:
            found: object = importlib.import_module(
                ".".join(parts[:num_module_parts]) or "builtins"
            )
        except ModuleNotFoundError:
            continue
        for part in parts[num_module_parts:]:
            found = getattr(found, part, None)
        if found is not None:
            return found
    return None
