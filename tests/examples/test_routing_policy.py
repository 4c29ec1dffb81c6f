"""`examples/routing_policy.py`, loaded as an operator's router loads it: by name, from the Python path."""

from pathlib import Path
from random import Random

import pytest

from baton.config.load import load
from baton.config.setting import Setting
from baton.ids import Role
from router.routing.index import PrefixIndex
from router.routing.policies import policy_named
from router.routing.policy import Demand, Pair, Policy
from router.routing.view import ClusterView
from tests.router.known_workers import hello

EXAMPLES = Path(__file__).parents[2] / "examples"
NAME = "routing_policy:SpotLast"


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Policy:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return policy_named(NAME)


def chosen(policy: Policy, view: ClusterView) -> tuple[str, str]:
    demand = Demand(tokens=100, samples=1, held={})
    pair = policy.pair(view.usable(0.0), demand, Random(0))
    assert isinstance(pair, Pair)
    return pair.prefill.identity.worker_id, pair.decode.identity.worker_id


def cluster(*names: str) -> ClusterView:
    view = ClusterView(PrefixIndex(max_blocks=100))
    for name in names:
        role = Role.DECODE if name.endswith("d") else Role.PREFILL
        view.join(hello(name, role), f"unix:{name}", 0.0)
    return view


def test_the_configuration_takes_it():
    given = Setting(path="router.policy", value=NAME, source="--policy", is_text=True)
    assert load(None, environment=[], flags=[given]).router.policy == NAME


def test_a_spot_worker_is_left_alone_while_there_is_another(policy: Policy):
    view = cluster("spot-p", "own-p", "spot-d", "own-d")
    for name in ("own-p", "own-d"):
        worker = view.find(name)  # type: ignore[arg-type]
        assert worker is not None
        worker.prefill_tokens, worker.decode_sequences, worker.legs = 90_000, 90, 90
    assert chosen(policy, view) == ("own-p", "own-d")


def test_a_spot_worker_is_taken_where_there_is_no_other(policy: Policy):
    assert chosen(policy, cluster("spot-p", "own-d")) == ("spot-p", "own-d")


def test_fewer_sequences_win(policy: Policy):
    view = cluster("own-p", "a-d", "b-d")
    busy = view.find("a-d")  # type: ignore[arg-type]
    assert busy is not None
    busy.decode_sequences = 3
    assert chosen(policy, view) == ("own-p", "b-d")
