"""Builds the one `BatonConfig` of a process: file < environment < flags, checked before anything starts.

Every error is one line that names the place of the value at fault:
`cluster.yaml: router.port: expected int, got 'abc'`.
"""

import difflib
import types
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Union, cast, get_args, get_origin

import msgspec
import yaml

from baton.config.rules import RULES, contradiction
from baton.config.schema import BatonConfig
from baton.config.setting import SECRETS, SECTIONS, TYPES, Setting, section_fields
from baton.config.sizes import parse_size
from baton.config.speculative import read_speculative
from baton.config.yaml_text import read_yaml
from baton.errors import ConfigError, first_line


def load(
    file: Path | None = None,
    *,
    environment: Iterable[Setting] = (),
    flags: Iterable[Setting] = (),
) -> BatonConfig:
    """The configuration; a later source wins over an earlier one, setting by setting.

    Raises:
        ConfigError: The file cannot be read, or a value is unknown, of the wrong type, or out of range.
    """
    config, faults = check(file, environment=environment, flags=flags)
    if config is None:
        raise faults[0]
    return config


def check(
    file: Path | None = None,
    *,
    environment: Iterable[Setting] = (),
    flags: Iterable[Setting] = (),
) -> tuple[BatonConfig | None, list[ConfigError]]:
    """The configuration, or None and everything that is wrong with it, setting by setting.

    What does not fit together between settings is looked for only once each is in order, and told one at a time.
    """
    faults: list[ConfigError] = []
    in_file = _file_settings(file, faults) if file is not None else []
    given: dict[str, tuple[Setting, object]] = {}
    for source in (in_file, environment, flags):
        for setting in source:
            try:
                value = _read(setting)
                given[setting.path] = (setting, _convert(setting, value))
            except ConfigError as error:
                faults.append(error)
            else:
                faults.extend(_unknown_names(setting, value))
    faults.extend(_broken_rules(given))
    faults.extend(_speculative_faults(given))
    if faults:
        return None, faults
    values = {path: value for path, (_, value) in given.items()}
    config = _assemble(_only_hybrid(values) | values)
    if (problem := contradiction(config)) is not None:
        return None, [ConfigError(f"{file}: {problem}" if file is not None else problem)]
    return config, []


def to_json(config: BatonConfig) -> bytes:
    """One line of JSON that `from_json` reads back; holds the secrets too, so it goes nowhere but over a lifeline."""
    return msgspec.json.encode(config)


def from_json(line: bytes) -> BatonConfig:
    """The configuration that `to_json` wrote.

    Raises:
        ConfigError: The line is not such a configuration.
    """
    try:
        return msgspec.json.decode(line, type=BatonConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(f"configuration of a child process: {error}") from error


def _file_settings(file: Path, faults: list[ConfigError]) -> list[Setting]:
    """The settings of `file` that the schema has; of the rest it adds a fault each."""
    try:
        document = _parse(file)
    except ConfigError as error:
        faults.append(error)
        return []
    if document is None:
        return []
    if not isinstance(document, dict):
        problem = f"{file}: expected sections such as `router:`, got {document!r}"
        faults.append(ConfigError(problem))
        return []
    return [
        setting for name, body in document.items() for setting in _section(file, name, body, faults)
    ]


def _parse(file: Path) -> object:
    try:
        return read_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text") from error
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{file}{line}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: {first_line(error)}") from error


def _section(
    file: Path, section: object, body: object, faults: list[ConfigError]
) -> Iterator[Setting]:
    if section not in SECTIONS:
        hint = _suggestion(section, SECTIONS)
        faults.append(ConfigError(f"{file}: {section}: no such section{hint}"))
        return
    name = str(section)
    if body is None:
        return
    if not isinstance(body, dict):
        faults.append(ConfigError(f"{file}: {name}: expected settings, got {body!r}"))
        return
    for key, value in body.items():
        path = f"{name}.{key}"
        if path in TYPES:
            yield Setting(path=path, value=value, source=f"{file}: {path}")
        else:
            hint = _suggestion(key, section_fields(name))
            faults.append(ConfigError(f"{file}: {path}: no such setting{hint}", param=path))


def _suggestion(name: object, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _read(setting: Setting) -> object:
    """What a text says, of a size, a list or JSON; any other value as it is given."""
    declared: Any = TYPES[setting.path]
    value = setting.value
    if _is_size(setting.path) and isinstance(value, str):
        value = parse_size(value)
        if value is None:
            raise ConfigError(
                f"{setting.source}: expected a size such as 4GiB, got {setting.value!r}",
                param=setting.path,
            )
    if setting.is_text and isinstance(value, str) and get_origin(declared) is tuple:
        value = [item.strip() for item in value.split(",")]
    if setting.is_text and isinstance(value, str) and get_origin(declared) is dict:
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            message = f"{setting.source}: expected JSON, got {setting.value!r}"
            raise ConfigError(message, param=setting.path) from error
    return value


def _convert(setting: Setting, value: object) -> object:
    declared: Any = TYPES[setting.path]
    try:
        converted = msgspec.convert(value, declared, strict=not setting.is_text)
        msgspec.json.encode(converted)  # as other processes are told it
    except msgspec.ValidationError as error:
        raise ConfigError(_mismatch(setting, declared), param=setting.path) from error
    except UnicodeEncodeError as error:  # bytes of the command line or the environment
        raise ConfigError(f"{setting.source}: not UTF-8 text", param=setting.path) from error
    except RecursionError:
        raise ConfigError(f"{setting.source}: nested too deeply", param=setting.path) from None
    return converted


def _unknown_names(setting: Setting, value: object) -> Iterator[ConfigError]:
    """Names within the records that a setting is made of, such as `router.slo_classes.standard.tbt`, that these lack."""
    declared = TYPES[setting.path]
    if get_origin(declared) is not dict or not is_dataclass(record := get_args(declared)[1]):
        return
    known = [field.name for field in fields(record)]
    for name, body in cast("dict[str, dict[str, object]]", value).items():
        for key in body:
            if key not in known:
                inner = f"{name}.{key}"
                yield ConfigError(
                    f"{setting.source}.{inner}: no such setting{_suggestion(key, known)}",
                    param=f"{setting.path}.{inner}",
                )


def _is_size(path: str) -> bool:
    return "_bytes" in path


def _mismatch(setting: Setting, declared: object) -> str:
    expected = f"{setting.source}: expected {_type_name(declared)}"
    return expected if setting.path in SECRETS else f"{expected}, got {setting.value!r}"


def _type_name(declared: object) -> str:
    if get_origin(declared) in (Union, types.UnionType):
        return " or ".join(_type_name(option) for option in get_args(declared))
    if get_origin(declared) is tuple:
        return f"a list of {_type_name(get_args(declared)[0])}"
    if declared is types.NoneType:
        return "null"
    return declared.__name__ if isinstance(declared, type) else str(declared)


def _broken_rules(given: dict[str, tuple[Setting, object]]) -> Iterator[ConfigError]:
    for rule in RULES:
        if rule.path not in given:
            continue
        setting, value = given[rule.path]
        if value is not None and not rule.holds(value):
            shown = "" if rule.path in SECRETS else f", not {value!r}"
            yield ConfigError(f"{setting.source}: {rule.demand}{shown}", param=rule.path)


def _speculative_faults(given: dict[str, tuple[Setting, object]]) -> Iterator[ConfigError]:
    """Field by field, since each has limits of its own."""
    if (found := given.get("engine.speculative_config")) is None:
        return
    setting, value = found
    try:
        read_speculative(cast("dict[str, object]", value))
    except ConfigError as error:
        yield ConfigError(f"{setting.source}: {error}", param=error.param)


def _only_hybrid(values: dict[str, object]) -> dict[str, object]:
    """With hybrid workers set, the default numbers of prefill and decode workers are 0."""
    if not values.get("cluster.hybrid_workers"):
        return {}
    return {"cluster.prefill_workers": 0, "cluster.decode_workers": 0}


def _assemble(values: dict[str, object]) -> BatonConfig:
    sections = {}
    for section, owner in SECTIONS.items():
        names = [name for name in section_fields(section) if f"{section}.{name}" in values]
        sections[section] = owner(**{name: values[f"{section}.{name}"] for name in names})
    return BatonConfig(**sections)
