"""Typed reading of a JSON file that came with a model, so that a wrong value is one clear line and not a traceback."""

import json
import sys
from pathlib import Path

from baton.errors import ModelLoadError


class JsonFields:
    """The fields of one JSON object, each read with the type it must have.

    Args:
        values: The parsed object.
        source: What to call it in errors: a path, perhaps with a key.
    """

    def __init__(self, values: dict[str, object], source: str) -> None:
        self.values = values
        self._source = source

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer, at least `minimum`."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.wrong(name, f"an integer of at least {minimum}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number greater than zero, and finite."""
        value = self._get(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value <= sys.float_info.max
        ):
            raise self.wrong(name, "a number above 0")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty when absent."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, "a list of strings")
        return tuple(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; empty when absent."""
        value = self.values.get(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(
            isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids
        ):
            raise self.wrong(name, "a token id or a list of token ids")
        return tuple(ids)

    def child(self, name: str) -> "JsonFields":
        """A nested object; empty when absent."""
        value = self.values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return JsonFields(value, f"{self._source}: {name}")

    def wrong(self, name: str, expected: str) -> ModelLoadError:
        """The error that says what `name` must be."""
        found = self.values.get(name)
        what = "is missing" if found is None else f"is {found!r}"
        return ModelLoadError(f"{self._source}: {name} {what}, but must be {expected}")

    def _get(self, name: str, default: object) -> object:
        value = self.values.get(name)
        return default if value is None else value


def read_json_fields(path: Path) -> JsonFields:
    """Reads a JSON file that holds one object.

    Raises:
        ModelLoadError: The file is missing, unreadable, or holds anything else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(
            f"{path.parent} is not a model directory: it has no {path.name}"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return JsonFields(values, str(path))
