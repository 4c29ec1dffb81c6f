"""Server-sent events with names, as the newer protocols write them."""

import msgspec
from pydantic import BaseModel


def named_event(kind: str, data: bytes) -> bytes:
    """One event: its name and its JSON, which says the name again as `type`."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def model_event(event: BaseModel) -> bytes:
    """The event that `event`, a model with a `type`, describes."""
    kind: str = getattr(event, "type")  # noqa: B009  # every event model has one of its own literal type
    return named_event(kind, event.model_dump_json().encode())


def json_text(text: str) -> bytes:
    """`text` as a JSON string."""
    return msgspec.json.encode(text)
