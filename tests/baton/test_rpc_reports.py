"""What crosses a process boundary arrives as it was sent."""

from typing import Any

from baton.errors import InvalidRequestError
from baton.generation import WorkerLoad
from baton.rpc.reports import failure_from_proto, failure_to_proto, load_from_proto, load_to_proto


def test_a_load_report_with_every_field_set() -> None:
    names = WorkerLoad.__dataclass_fields__
    fields: dict[str, Any] = {name: i for i, name in enumerate(names, start=1)}
    fields |= {"draining": True, "changing_role": True}
    load = WorkerLoad(**fields | {"pool_node": "pool-0", "drained_by": "kim"})
    assert load_from_proto(load_to_proto(load)) == load


def test_an_error_keeps_its_type_and_param() -> None:
    error = InvalidRequestError("too many", param="n")
    back = failure_from_proto(failure_to_proto(error))
    assert type(back) is InvalidRequestError
    assert (back.message, back.param) == ("too many", "n")
