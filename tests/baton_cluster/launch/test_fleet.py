from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config.load import load
from baton.config.setting import Setting
from baton.errors import InvalidRequestError
from baton_cluster.launch.fleet import WorkerFleet
from baton_cluster.launch.plan import plan_children, plan_worker, resolve
from baton_cluster.launch.runtime_dir import RuntimeDir


def fleet_of(prefill=1, decode=1, *, most=8, gpus=0, cores=(), others=False, **values):
    given_values = {
        "cluster.prefill_workers": prefill,
        "cluster.decode_workers": decode,
        "pool.enabled": False,
    } | {name.replace("__", "."): value for name, value in values.items()}
    loaded = load(flags=[Setting(path=p, value=v, source=p) for p, v in given_values.items()])
    config = resolve(loaded, runtime_dir=Path("/run/b"), port=8123, cores=max(1, len(cores)))
    runtime = RuntimeDir(Path("/run/b"), -1)
    plans = plan_children(config, runtime, gpus, cores)
    return WorkerFleet(
        [plan for plan in plans if plan.worker is not None],
        lambda role, index, number: plan_worker(role, index, number, config, runtime, gpus, cores),
        most=most,
        gpus=gpus,
        others=others,
    )


def added(fleet, **pools):
    return {plan.name: plan.worker for plan in fleet.scale(pools).added}


def test_names_continue_and_those_with_the_highest_go():
    fleet = fleet_of()
    assert list(added(fleet, decode=3)) == ["decode-1", "decode-2"]
    assert fleet.scale({"decode": 1}).retired == ("decode-1", "decode-2")
    assert fleet.pools == {"prefill": 1, "decode": 1, "hybrid": 0}


def test_a_retired_worker_stays_planned_until_it_is_gone():
    fleet = fleet_of(decode=2)
    fleet.scale({"decode": 1})
    assert "decode-1" in {plan.name for plan in fleet.plans}
    fleet.gone("decode-1")
    assert "decode-1" not in {plan.name for plan in fleet.plans}


@pytest.mark.parametrize(
    ("pools", "why"),
    [
        ({"decoder": 2}, "decoder: there is no such pool; the pools are prefill, decode, hybrid"),
        ({"decode": -1}, "decode=-1: the number of workers must be at least 0"),
        ({"decode": 8}, "prefill=1 decode=8 are 9 workers: cluster.max_workers is 8"),
        ({"decode": 0}, "decode=0: no worker would be left that decodes"),
        ({"prefill": 0, "decode": 0}, "prefill=0: no worker would be left that prefills"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(pools, why):
    fleet = fleet_of()
    with pytest.raises(InvalidRequestError) as refused:
        fleet.scale(pools)
    assert refused.value.message.startswith(why)
    assert fleet.pools == {"prefill": 1, "decode": 1, "hybrid": 0}


def test_hybrid_workers_may_take_the_place_of_both_pools():
    fleet = fleet_of()
    change = fleet.scale({"prefill": 0, "decode": 0, "hybrid": 2})
    assert [plan.name for plan in change.added] == ["hybrid-0", "hybrid-1"]
    assert change.retired == ("prefill-0", "decode-0")


def test_a_pool_may_become_empty_where_workers_run_elsewhere_too():
    assert fleet_of(others=True).scale({"decode": 0}).retired == ("decode-0",)


def test_an_added_worker_gets_a_gpu_of_its_own_or_is_refused():
    fleet = fleet_of(gpus=3)
    (worker,) = added(fleet, decode=2).values()
    assert (worker.gpu, worker.gpu_sharers) == (2, 1)
    with pytest.raises(InvalidRequestError, match="decode-2: the 3 GPUs of this machine are taken"):
        fleet.scale({"decode": 3})
    fleet.scale({"decode": 1})
    with pytest.raises(InvalidRequestError, match="taken"):
        fleet.scale({"prefill": 2})
    fleet.gone("decode-1")
    (worker,) = added(fleet, prefill=2).values()
    assert worker.gpu == 2


def test_an_added_worker_gets_cores_of_its_own_where_some_are_left():
    fleet = fleet_of(cores=range(5), engine__num_threads=2)
    assert [plan.worker.cores for plan in fleet.plans] == [(0, 1), (2, 3)]
    assert added(fleet, decode=2)["decode-1"].cores == ()
    fleet = fleet_of(cores=range(6), engine__num_threads=2)
    assert added(fleet, decode=2)["decode-1"].cores == (4, 5)


def test_an_added_worker_answers_prometheus_behind_the_ports_of_those_before_it():
    fleet = fleet_of(cluster__metrics_port=9100)
    assert added(fleet, decode=2)["decode-1"].metrics_address == "127.0.0.1:9102"
    pooled = fleet_of(cluster__metrics_port=9100, pool__enabled=True)
    assert added(pooled, decode=2)["decode-1"].metrics_address == "127.0.0.1:9103"


POOLS = st.fixed_dictionaries(
    {}, optional={name: st.integers(0, 5) for name in ("prefill", "decode", "hybrid")}
)


@given(st.lists(st.tuples(POOLS, st.booleans()), max_size=20), st.integers(0, 4))
def test_after_any_changes_every_worker_has_a_number_of_its_own_and_no_limit_is_passed(
    changes, gpus
):
    fleet = fleet_of(most=6, gpus=gpus)
    ending: set[str] = set()
    for pools, all_are_gone in changes:
        try:
            change = fleet.scale(pools)
        except InvalidRequestError:
            change = None
        if change is not None:
            ending = (ending | set(change.retired)) - {plan.name for plan in change.added}
        if all_are_gone:
            for name in ending:
                fleet.gone(name)
            ending.clear()
        fleet.check_integrity()
        names = {plan.name for plan in fleet.plans}
        wanted = {f"{pool}-{i}" for pool, count in fleet.pools.items() for i in range(count)}
        assert names == wanted | ending
        assert len(wanted) <= 6
        assert fleet.pools["prefill"] + fleet.pools["hybrid"] > 0
        assert fleet.pools["decode"] + fleet.pools["hybrid"] > 0
        if gpus >= 2:
            assert len({plan.worker.gpu for plan in fleet.plans}) == len(fleet.plans)


def test_a_worker_for_whose_metrics_there_is_no_port_is_refused():
    fleet = fleet_of(cluster__metrics_port=65533)
    fleet.scale({"decode": 2})
    with pytest.raises(InvalidRequestError, match="from 65533 there is no port left"):
        fleet.scale({"decode": 3})
    assert fleet.pools["decode"] == 2
    fleet.check_integrity()
