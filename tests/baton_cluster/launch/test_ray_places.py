"""What is asked of Ray and what is said where it has no room; Ray itself is in tests/e2e/test_ray.py."""

import asyncio
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.config.schema import BatonConfig, ClusterConfig, PoolConfig, RayConfig
from baton.errors import ConfigError, UnavailableError
from baton.ids import Incarnation, Role
from baton_cluster.cli.main import main
from baton_cluster.launch.assignment import Assignment, Part
from baton_cluster.launch.plan import plan_worker
from baton_cluster.launch.ray_places import (
    NodeFacts,
    RayPlaces,
    bundle_of,
    fit_ray,
    why_unplaced,
)
from baton_cluster.launch.runtime_dir import RuntimeDir
from baton_cluster.launch.supervisor import ChildExited, ChildFatal
from tests.waits import soon

FOUND = ClusterConfig(discovery="redis", redis_url="redis://127.0.0.1", secret="ab" * 32)
SMALL = NodeFacts(resources={"CPU": 2.0}, labels={"zone": "a"})
LARGE = NodeFacts(resources={"CPU": 8.0, "GPU": 1.0}, labels={"zone": "b"})


def test_a_bundle_holds_what_is_above_zero():
    assert bundle_of(RayConfig(num_cpus=2, resources={"left": 1})) == {"CPU": 2, "left": 1}


def test_workers_compute_with_as_many_threads_as_ray_gives_them():
    fitted = fit_ray(BatonConfig(cluster=FOUND, ray=RayConfig(num_cpus=4)))
    assert fitted.engine.num_threads == 4


@pytest.mark.parametrize(
    ("config", "param"),
    [
        (BatonConfig(), "cluster.discovery"),
        (BatonConfig(cluster=FOUND, pool=PoolConfig(enabled=True)), "pool.enabled"),
    ],
)
def test_what_does_not_fit_is_refused_by_field(config, param):
    with pytest.raises(ConfigError) as refused:
        fit_ray(config)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("bundle", "count", "labels", "told"),
    [
        ({"CPU": 9}, 1, {}, "bundle 0 (CPU 9): no node has CPU 9, the most is 8"),
        ({"GPU": 1}, 1, {"zone": "a"}, "no node has GPU 1, the most is 0"),
        ({"GPU": 1}, 3, {}, "bundle 1 (GPU 1): 2 nodes have room for 1 of 3"),
        ({"CPU": 1}, 1, {"zone": "c"}, "none of 2 nodes has the labels {'zone': 'c'}"),
        ({"CPU": 1}, 2, {}, "nodes have as much in all, but not free"),
    ],
)
def test_what_is_missing_is_said(bundle, count, labels, told):
    assert told in why_unplaced(bundle, count, labels, [SMALL, LARGE])


def test_an_address_of_ray_needs_its_launcher(capsys):
    assert main(["serve", "--ray-address", "10.0.0.1:6379"]) == 2
    assert "--ray-address needs --launcher ray" in capsys.readouterr().err


class Ray:
    """Stands for the module `ray`: nodes with room for so many bundles, and actors whose workers end at once."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.refusal = ""
        self.groups: list[int] = []
        self.placed: list[tuple[int, int]] = []
        self.exceptions = SimpleNamespace(RayError=type("RayError", (Exception,), {}))
        self.util = SimpleNamespace(
            placement_group=self._group, remove_placement_group=self._remove
        )
        self.strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=self._place)

    def init(self, **_: object) -> None:
        return

    def shutdown(self) -> None:
        return

    def kill(self, actor: object, *, no_restart: bool) -> None:
        return

    def nodes(self) -> list[dict[str, object]]:
        return [{"Alive": True, "Resources": {"CPU": float(self.room)}, "Labels": {}}]

    def remote(self, _: object) -> SimpleNamespace:
        async def address() -> str:
            return "127.0.0.1"

        async def number() -> int:
            return 0

        actor = SimpleNamespace(
            start=SimpleNamespace(remote=lambda *_: number()),
            next_status=SimpleNamespace(remote=number),
            __ray_call__=SimpleNamespace(remote=lambda _: address()),
        )

        def made() -> SimpleNamespace:
            if self.refusal:
                raise ValueError(self.refusal)
            return actor

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=made))

    def _group(
        self,
        bundles: list[object],
        *,
        bundle_label_selector: list[dict[str, str]] | None,
        **_: object,
    ) -> SimpleNamespace:
        if any(" " in label for each in bundle_label_selector or () for label in each):
            raise ValueError("Invalid label key name")
        size = len(bundles)
        self.groups.append(size)
        fits = sum(self.groups) <= self.room
        return SimpleNamespace(size=size, wait=lambda timeout_seconds: fits)

    def _remove(self, group: SimpleNamespace) -> None:
        self.groups.remove(group.size)

    def _place(self, group: SimpleNamespace, *, placement_group_bundle_index: int) -> None:
        self.placed.append((group.size, placement_group_bundle_index))


@pytest.fixture
def ray(monkeypatch) -> Ray:
    """With room for six workers."""
    fake = Ray(6)
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", fake.strategies)
    for name in ("AUTH_MODE", "AUTH_TOKEN", "gcs_rpc_server_reconnect_timeout_s"):
        monkeypatch.setenv(f"RAY_{name}", "1")
    return fake


async def started(places: RayPlaces, config: BatonConfig, index: int) -> list[object]:
    """What is told of the start of the decode worker with this index."""
    runtime = RuntimeDir(Path("/run/b"), -1)
    plan = plan_worker(Role.DECODE, index, index, config, runtime)
    part = Part(name=plan.name, incarnation=Incarnation(7), worker=plan.worker, lock_fd=-1)
    child = await places.start(plan, Assignment(config=config, part=part))
    return [event async for event in child.events()]


async def until_there_are(ray: Ray, groups: list[int]) -> None:
    while ray.groups != groups:  # noqa: ASYNC110  # a thread gives the place back
        await asyncio.sleep(0.001)


async def test_a_worker_that_is_added_has_a_group_of_its_own_until_it_is_removed(ray):
    config = fit_ray(BatonConfig(cluster=FOUND, ray=RayConfig(num_cpus=1)))
    with RayPlaces(config) as places:
        assert ray.groups == [1, 1]
        assert [type(event) for event in await soon(started(places, config, 0))] == [ChildExited]
        assert [type(event) for event in await soon(started(places, config, 1))] == [ChildExited]
        await soon(started(places, config, 1))  # once more: in the place that it has
        assert ray.groups == [1, 1, 1]
        assert ray.placed == [(1, 0), (1, 0), (1, 0)]
        places.release("decode-1")
        await soon(until_there_are(ray, [1, 1]))
        places.release("decode-0")  # that of the start is kept
        await soon(started(places, config, 0))
        assert ray.groups == [1, 1]
    assert ray.groups == []


async def test_a_worker_that_is_added_without_room_says_what_is_missing_and_waits_for_nothing(ray):
    config = fit_ray(BatonConfig(cluster=FOUND, ray=RayConfig(num_cpus=1)))
    with RayPlaces(config) as places:
        ray.room = 2
        fatal, exited = await soon(started(places, config, 1))
        assert isinstance(fatal, ChildFatal)
        assert fatal.error.message.startswith("Ray has no room for decode-1: ")
        assert isinstance(exited, ChildExited)
        assert ray.groups == [1, 1]


async def test_a_worker_of_which_ray_makes_no_actor_ends_and_says_why(ray):
    config = fit_ray(BatonConfig(cluster=FOUND, ray=RayConfig(num_gpus=1.5)))
    ray.refusal = "GPU resource quantities >1 must be whole numbers"
    with RayPlaces(config) as places:
        fatal, exited = await soon(started(places, config, 0))
        assert isinstance(fatal, ChildFatal)
        assert fatal.error.message.endswith("must be whole numbers")
        assert isinstance(exited, ChildExited)


def test_labels_that_are_none_are_refused(ray):
    config = fit_ray(BatonConfig(cluster=FOUND, ray=RayConfig(labels={"a b": "c"})))
    with pytest.raises(ConfigError, match="Invalid label key name"), RayPlaces(config):
        pytest.fail("there is no place")


def test_a_head_at_whose_address_nobody_listens_is_one_line(ray):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with RayPlaces(fit_ray(BatonConfig(cluster=FOUND, ray=RayConfig(address=address)))):
            pass  # somebody listens
    with (
        pytest.raises(UnavailableError, match=f"^Ray at {address}: connection refused$"),
        RayPlaces(fit_ray(BatonConfig(cluster=FOUND, ray=RayConfig(address=address)))),
    ):
        pytest.fail("there is no place")
