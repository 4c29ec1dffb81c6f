"""What is asked of Ray and what is said where it has no room; Ray itself is in tests/e2e/test_ray.py."""

import pytest

from baton.config.schema import BatonConfig, ClusterConfig, PoolConfig, RayConfig
from baton.errors import ConfigError
from baton_cluster.cli.main import main
from baton_cluster.launch.ray_places import NodeFacts, bundle_of, fit_ray, why_unplaced

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
