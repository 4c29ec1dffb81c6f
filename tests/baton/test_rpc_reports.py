"""What crosses a process boundary arrives as it was sent."""

from typing import Any
import pytest
from hypothesis import given
from hypothesis import strategies as st
from baton.errors import InvalidRequestError
from baton.generation import (
    FinishReason,
    Prompt,
    SamplingParams,
    TokenLogprobs,
    TokenSample,
    WorkerLoad,
)
from baton.ids import Incarnation, LayerName, LegId, RequestId, Role, WorkerId, WorkerIdentity
from baton.layout import KvLayout
from baton.rpc.generation import (
    prompt_from_proto,
    prompt_logprobs_from_proto,
    prompt_logprobs_to_proto,
    prompt_to_proto,
    sample_from_proto,
    sample_to_proto,
)
from baton.rpc.hello import WorkerHello, hello_from_proto, hello_to_proto
from baton.rpc.reports import failure_from_proto, failure_to_proto, load_from_proto, load_to_proto
from baton.rpc.v1 import common_pb2 as pb



def test_a_load_report_with_every_field_set() -> None:
    names = WorkerLoad.__dataclass_fields__
    fields: dict[str, Any] = {name: i for i, name in enumerate(names, start=1)}
    load = WorkerLoad(**fields | {"draining": True})
    assert load_from_proto(load_to_proto(load)) == load


def test_an_error_keeps_its_type_and_param() -> None:
    error = InvalidRequestError("too many", param="n")
    back = failure_from_proto(failure_to_proto(error))
    assert type(back) is InvalidRequestError
    assert (back.message, back.param) == ("too many", "n")
