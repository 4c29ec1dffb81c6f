"""One tree, one table."""

import grpc
import pytest

from baton import errors
from baton.errors import DISPOSITIONS, BatonError, InvalidRequestError, disposition, from_code


def _subclasses(cls: type[BatonError]) -> set[type[BatonError]]:
    return {cls}.union(*(_subclasses(child) for child in cls.__subclasses__()))


def test_every_error_has_a_row_and_a_code_of_its_own() -> None:
    ours = {error for error in _subclasses(BatonError) if error.__module__ == errors.__name__}
    assert ours == set(DISPOSITIONS)
    assert len({error.code for error in ours}) == len(ours)


@pytest.mark.parametrize("error", DISPOSITIONS, ids=lambda error: error.code)
def test_an_error_survives_the_way_through_a_message(error: type[BatonError]) -> None:
    there = error("what happened", param="field")
    here = from_code(there.code, there.message, there.param)
    assert type(here) is error
    assert (here.message, here.param) == ("what happened", "field")


def test_an_unknown_code_is_an_internal_error_and_no_crash() -> None:
    assert type(from_code("from_the_future", "x")) is BatonError


@pytest.mark.parametrize("error", DISPOSITIONS, ids=lambda error: error.code)
def test_a_row_names_real_codes(error: type[BatonError]) -> None:
    row = disposition(error("x"))
    assert hasattr(grpc.StatusCode, row.grpc)
    assert 400 <= row.http < 600
    assert row.retryable <= (row.http in (429, 500, 503, 504))


def test_a_client_fault_is_never_called_a_server_fault() -> None:
    assert disposition(InvalidRequestError("x", param="n")).http == 400
