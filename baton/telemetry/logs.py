"""Structured logs of every process, on the standard library's logging: an event, and fields beside it.

`log.info("worker lost", worker="decode-0", in_flight=3)` reads in `text` as

    12:03:04.117 INFO    router[4242] router.dispatch: worker lost worker=decode-0 in_flight=3

and in `json` as one object per line. What people ask a model and what it answers is never logged: the fields that would
hold it are refused here, from every caller.
"""

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import TextIO

from baton.config.schema import LogConfig

FieldValue = str | int | float | bool | None

REDACTED = "<redacted>"

_PRIVATE = frozenset(
    {
        "api_key",
        "api_keys",
        "authorization",
        "body",
        "completion",
        "content",
        "messages",
        "password",
        "prompt",
        "secret",
        "text",
    }
)
_MAX_FIELD_CHARS = 500
_FIELDS = "baton_fields"

# Their `info` is about each connection or request; ours says what matters.
_NOISY = ("asyncio", "filelock", "httpcore", "httpx", "huggingface_hub", "urllib3", "uvicorn")


class Log:
    """A named logger that takes fields by keyword. Cheap when its level is off."""

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, **fields: FieldValue) -> None:
        """What helps to follow a single request or step."""
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: FieldValue) -> None:
        """What an operator wants in the record of a good day."""
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, **fields: FieldValue) -> None:
        """Something failed and was dealt with."""
        self._emit(logging.WARNING, event, fields)

    def error(
        self, event: str, *, cause: BaseException | None = None, **fields: FieldValue
    ) -> None:
        """Something failed that someone should look at; `cause` adds its traceback."""
        self._emit(logging.ERROR, event, fields, cause)

    def _emit(
        self,
        level: int,
        event: str,
        fields: dict[str, FieldValue],
        cause: BaseException | None = None,
    ) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", event, extra={_FIELDS: fields}, exc_info=cause)


def get_logger(name: str) -> Log:
    """The logger of a module; call it with `__name__`."""
    return Log(logging.getLogger(name))


def configure(config: LogConfig, component: str, *, stream: TextIO | None = None) -> None:
    """Sends every log of this process to `stream` (standard error), replacing what was configured before.

    Args:
        config: Level and format.
        component: What this process is, such as `router` or `decode-0`; stands in every line.
        stream: Where to; standard error if None.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    process = f"{component}[{os.getpid()}]"
    handler.setFormatter(
        JsonFormatter(process)
        if config.format == "json"
        else TextFormatter(process, on_terminal=handler.stream.isatty())
    )
    level = getattr(logging, config.level.upper())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


class TextFormatter(logging.Formatter):
    """One line for people; a traceback follows on lines of its own.

    On a terminal each line first wipes the one it begins on, where another process may be showing its progress.
    """

    def __init__(self, process: str, *, on_terminal: bool = False) -> None:
        super().__init__()
        self._process = process
        self._start = "\r\x1b[2K" if on_terminal else ""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, process, component, event, fields."""
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        head = f"{time} {record.levelname:<7} {self._process} {record.name}: {record.getMessage()}"
        fields = [f"{name}={_as_text(value)}" for name, value in _fields(record).items()]
        line = self._start + " ".join([head.replace("\n", "\\n"), *fields])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line for machines."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The standard keys, then the fields under names of their own."""
        entry: dict[str, FieldValue | dict[str, FieldValue]] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "component": record.name,
            "event": record.getMessage(),
        }
        if fields := _fields(record):
            entry["fields"] = fields
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _fields(record: logging.LogRecord) -> dict[str, FieldValue]:
    fields: dict[str, FieldValue] = getattr(record, _FIELDS, {})
    return {name: _safe(name, value) for name, value in fields.items()}


def _safe(name: str, value: FieldValue) -> FieldValue:
    if name in _PRIVATE:
        return REDACTED
    if isinstance(value, str) and len(value) > _MAX_FIELD_CHARS:
        return value[:_MAX_FIELD_CHARS] + "…"
    return value


def _as_text(value: FieldValue) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)  # escapes what could steer a terminal
    if isinstance(value, str) and (not value or any(c.isspace() or c in '"=' for c in value)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
