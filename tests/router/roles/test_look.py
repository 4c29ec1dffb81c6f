"""What the planner sees of the router's line."""

import pytest

from baton.generation import WorkerLoad
from baton.ids import Role
from router.roles.look import look_at
from router.routing.index import PrefixIndex
from router.routing.view import ClusterView
from tests.router.known_workers import hello


@pytest.mark.parametrize(("draining", "waiting"), [(False, 500), (True, 0)])
def test_requests_that_wait_for_any_worker_are_not_those_that_wait_for_a_place_to_decode(
    draining: bool, waiting: int
) -> None:
    view = ClusterView(PrefixIndex())
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
        worker = view.join(hello(name, role), f"unix:{name}", 0.0)
        worker.report(WorkerLoad(draining=draining), 0.0)
    seen = look_at(view, 0.0, waiting=500)
    assert (seen.waiting, seen.waiting_s) == (waiting, 0.0)
