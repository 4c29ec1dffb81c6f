"""`model.lora_modules`: adapters that are served beside the model, in the form of vLLM's `--lora-modules`."""

from collections.abc import Iterable

from baton.errors import ConfigError

_PATH = "model.lora_modules"


def read_lora_modules(entries: Iterable[str]) -> dict[str, str]:
    """The directory of each adapter by its name, in the order given.

    Args:
        entries: `NAME=PATH` each.

    Raises:
        ConfigError: One has another form, or two have one name.
    """
    modules: dict[str, str] = {}
    for entry in entries:
        name, equals, path = entry.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"{_PATH}: {entry!r} is not NAME=PATH", param=_PATH)
        if name in modules:
            raise ConfigError(f"{_PATH}: two adapters are named {name}", param=_PATH)
        modules[name] = path
    return modules


def are_lora_modules(entries: Iterable[str]) -> bool:
    """Whether `read_lora_modules` takes them."""
    try:
        read_lora_modules(entries)
    except ConfigError:
        return False
    return True
