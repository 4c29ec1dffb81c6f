"""From the names in the operator's configuration to guardrails."""

import importlib
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from baton.errors import ConfigError
from router.guardrails.ports import Guardrail

GROUP = "baton.guardrails"


def load_guardrails(names: Sequence[str]) -> tuple[Guardrail, ...]:
    """One guardrail per name, in the order in which they are asked. Imports their code.

    Raises:
        ConfigError: There is no such thing, or it cannot be made.
    """
    return tuple(_made(name, _factory(name)) for name in names)


def _factory(name: str) -> Callable[[], Guardrail]:
    try:
        if ":" not in name:
            (found,) = entry_points(group=GROUP, name=name)
            factory: Callable[[], Guardrail] = found.load()
            return factory
        module, _, attribute = name.partition(":")
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise _unusable(name, f"there is no such entry point or attribute ({error})") from error
    return factory


def _made(name: str, factory: Callable[[], Guardrail]) -> Guardrail:
    try:
        guardrail = factory()
    except Exception as error:
        raise _unusable(name, f"it cannot be made: {error}") from error
    if not (hasattr(guardrail, "check_input") and hasattr(guardrail, "watch_output")):
        raise _unusable(name, "it has no check_input and watch_output")
    return guardrail


def _unusable(name: str, why: str) -> ConfigError:
    return ConfigError(f"router.guardrails: {name}: {why}", param="router.guardrails")
