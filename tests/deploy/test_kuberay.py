"""The overlay whose workers are placed on a RayCluster: what its parts say about each other, and about Ray."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.config.load import load
from baton.config.ports import parse_ports
from baton.config.schema import BatonConfig
from baton_cluster.launch.plan import started_here
from baton_cluster.launch.ray_places import bundle_of, fit_ray
from tests.deploy.manifests import ROOT, Object, Rendered, rendered
from tests.deploy.test_manifests import check_containers, placed

RAY = {"app.kubernetes.io/part-of": "baton", "app.kubernetes.io/component": "ray"}


@pytest.fixture
def ray() -> Rendered:
    return rendered("kuberay")


@pytest.fixture
def config(ray: Rendered, tmp_path: Path) -> BatonConfig:
    """With a secret, which is a file in the pods."""
    file = placed(ray, tmp_path)
    said = yaml.safe_load(file.read_text())
    said["cluster"]["secret"] = "5e" * 32
    file.write_text(yaml.safe_dump(said))
    return load(file, environment=[], flags=[])


def groups(ray: Rendered) -> dict[str, Object]:
    """The head and the workers."""
    (made,) = ray.of_kind("RayCluster")
    (workers,) = made["spec"]["workerGroupSpecs"]
    return {"head": made["spec"]["headGroupSpec"], "workers": workers}


def pods(ray: Rendered) -> dict[str, Object]:
    return {name: group["template"]["spec"] for name, group in groups(ray).items()}


def containers(ray: Rendered) -> list[tuple[str, Object, Object]]:
    """Name, spec and pod of each."""
    return [
        (f"{name}/{one['name']}", one, pod)
        for name, pod in pods(ray).items()
        for one in (*pod["containers"], *pod.get("initContainers", ()))
    ]


def test_the_configuration_suits_the_launcher_and_both_namespaces_have_it(ray, config):
    fitted = fit_ray(config)
    assert fitted.cluster.redis_url == "redis://redis.baton.svc:6379"
    assert ray.config("baton") == ray.config("baton-workers")


def test_routers_would_start(ray, tmp_path, monkeypatch, capsys):
    assert [one.spec["args"][1] for one in ray.processes()] == ["router"]
    check_containers(ray, tmp_path, monkeypatch, capsys)


def test_there_is_a_pod_for_each_worker_and_it_holds_exactly_one(ray, config):
    group = groups(ray)["workers"]
    (worker,) = group["template"]["spec"]["containers"]
    limits = worker["resources"]["limits"]
    assert worker["resources"]["requests"] == limits
    bundle = bundle_of(config.ray)
    assert bundle == {"CPU": float(limits["cpu"]), "GPU": float(limits["nvidia.com/gpu"])}
    assert group["replicas"] >= sum(started_here(config.cluster).values())
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert groups(ray)["head"]["rayStartParams"]["num-cpus"] == "0"


def test_the_launcher_reaches_the_ray_beside_it(ray):
    head, launcher = pods(ray)["head"]["containers"]
    assert launcher["args"][:3] == ["serve", "--file", "/etc/baton/cluster.yaml"]
    assert launcher["args"][3:] == ["--launcher", "ray", "--ray-address", "auto"]
    shared = [
        {mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]}
        for one in (head, launcher)
    ]
    assert shared[0]["/tmp"] == shared[1]["/tmp"]
    assert shared[0]["/dev/shm"] == shared[1]["/dev/shm"]
    env = {one["name"]: one["value"] for one in launcher["env"]}
    assert env["BATON_ROUTER_HOST"] == "127.0.0.1", "nobody is to find a router without keys"


def test_secrets_come_as_files_and_each_pod_has_its_own_part(ray):
    for label, one, pod in containers(ray):
        env = {variable["name"]: variable["value"] for variable in one.get("env", ())}
        mounted = {mount["mountPath"] for mount in one["volumeMounts"]}
        if one["name"] != "triton":
            assert env["RAY_AUTH_MODE"] == "token", label
            assert str(Path(env["RAY_AUTH_TOKEN_PATH"]).parent) in mounted, label
        (secret,) = [v["secret"] for v in pod["volumes"] if "secret" in v]
        assert secret["defaultMode"] == 0o440, label
        keys = {item["key"] for item in secret["items"]}
        assert keys == {"ray-token"} | ({"cluster-secret"} if "head" in label else set()), label


def test_nobody_runs_with_more_rights_than_it_needs(ray):
    for label, one, pod in containers(ray):
        own, of_pod = one["securityContext"], pod["securityContext"]
        assert own == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, label
        assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}, label
        assert of_pod["runAsNonRoot"] is True, label
        assert pod["automountServiceAccountToken"] is pod["enableServiceLinks"] is False, label
        for part in ("requests", "limits"):
            assert {"cpu", "memory"} <= one["resources"][part].keys(), label
        assert re.fullmatch(r"baton@sha256:[0-9a-f]{64}", one["image"]), label


def test_what_is_mounted_is_a_volume_that_is_there(ray):
    made = {one["metadata"]["name"] for one in ray.of_kind("ConfigMap", "PersistentVolumeClaim")}
    for pod in pods(ray).values():
        named = {volume["name"] for volume in pod["volumes"]}
        all_of = (*pod["containers"], *pod.get("initContainers", ()))
        assert {m["name"] for one in all_of for m in one["volumeMounts"]} == named
        for volume in pod["volumes"]:
            of = volume.get("configMap", {}).get("name") or volume.get(
                "persistentVolumeClaim", {}
            ).get("claimName")
            assert of is None or of in made, "kustomize has put the name with its hash there"


def test_probes_ask_ports_that_are_there_for_kuberays_own_need_a_program_of_its_image(ray):
    for pod in pods(ray).values():
        first = pod["containers"][0]
        ports = {port["name"] for port in first["ports"]}
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert first[kind]["tcpSocket"]["port"] in ports


def policies(ray: Rendered) -> dict[str, Any]:
    return {one["metadata"]["name"]: one["spec"] for one in ray.of_kind("NetworkPolicy")}


def opened(policy: Any) -> set[int]:
    """All ports."""
    return {
        port
        for rule in policy["ingress"]
        for one in rule["ports"]
        for port in range(one["port"], one.get("endPort", one["port"]) + 1)
    }


def admitted_beside(policy: Any) -> list[dict[str, str]]:
    """Labels of pods of its own namespace that it lets in."""
    return [
        source["podSelector"]["matchLabels"]
        for rule in policy["ingress"]
        for source in rule["from"]
        if "namespaceSelector" not in source
    ]


def test_rays_ports_are_fixed_and_open_among_its_pods_alone(ray):
    policy = policies(ray)["ray-to-ray"]
    assert policy["podSelector"]["matchLabels"] == RAY
    (rule,) = policy["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": RAY}}]
    for name, group in groups(ray).items():
        said = group["rayStartParams"]
        assert RAY.items() <= group["template"]["metadata"]["labels"].items()
        single = {int(said[key]) for key in ("node-manager-port", "object-manager-port")}
        of_workers = range(int(said["min-worker-port"]), int(said["max-worker-port"]) + 1)
        single |= {int(groups(ray)["head"]["rayStartParams"]["port"])}
        assert opened(policy) == single | set(of_workers), name


def test_routers_and_other_workers_reach_the_ports_that_workers_listen_at(ray, config):
    ours, kv = parse_ports(config.ray.worker_ports), parse_ports(config.transfer.ports)
    assert ours is not None
    assert kv is not None
    assert opened(policies(ray)["routers-to-workers"]) == set(ours)
    assert opened(policies(ray)["workers-to-workers"]) == set(ours) | set(kv)
    head, labels = (groups(ray)[of]["template"]["metadata"]["labels"] for of in ("head", "workers"))
    for name in ("routers-to-workers", "workers-to-workers"):
        assert policies(ray)[name]["podSelector"]["matchLabels"].items() <= labels.items()
    admitted = admitted_beside(policies(ray)["routers-to-workers"])
    assert any(one.items() <= head.items() for one in admitted), "the launcher's own router"
    admitted = admitted_beside(policies(ray)["workers-to-workers"])
    assert any(one.items() <= labels.items() for one in admitted)
    named = [
        source["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for source in policies(ray)["routers-and-pool-to-redis"]["ingress"][0]["from"]
    ]
    assert named == ["router", "ray"]


def test_no_part_of_what_ray_takes_the_place_of_is_left(ray):
    assert not ray.of_kind("StatefulSet", "DaemonSet")
    of_workers = [
        one for one in ray.of_kind("Service") if one["metadata"]["namespace"] == "baton-workers"
    ]
    assert not of_workers
    assert {one["metadata"]["name"] for one in ray.of_kind("PodDisruptionBudget")} == {
        "router",
        "ray",
    }
    assert not {"pool-to-pool", "routers-to-pool"} & policies(ray).keys()


def test_the_budget_lets_one_worker_go_and_says_nothing_of_the_head(ray):
    (budget,) = (
        one["spec"]
        for one in ray.of_kind("PodDisruptionBudget")
        if one["metadata"]["name"] == "ray"
    )
    head, workers = groups(ray)["head"], groups(ray)["workers"]
    wanted = budget["selector"]["matchLabels"].items()
    assert wanted <= workers["template"]["metadata"]["labels"].items()
    assert not wanted <= head["template"]["metadata"]["labels"].items()
    assert budget["minAvailable"] == workers["replicas"] - 1


def test_the_head_outlasts_the_drain_of_the_launcher(ray, config):
    head = pods(ray)["head"]
    (_, seconds) = head["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    drain_s = config.cluster.drain_timeout_s
    assert drain_s < float(seconds) < head["terminationGracePeriodSeconds"]


def test_the_image_has_the_ray_that_the_cluster_names(ray):
    (made,) = ray.of_kind("RayCluster")
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    assert made["spec"]["rayVersion"] == pinned[1]
    docker = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    (extras,) = re.findall(r'"\.\[(.+)\]"', docker)
    assert "ray" in extras.split(",")
    # KubeRay runs `/bin/bash -lc "ray start ..."`, whose PATH is that of /etc/profile.
    assert "RUN ln -s /opt/baton/bin/ray /usr/local/bin/ray" in docker


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: make ray"
)
def test_ray_knows_the_parameters(ray):
    shown = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", "start", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    for group in groups(ray).values():
        for name in group["rayStartParams"]:
            assert f"--{name} " in shown.stdout, name


def test_the_model_is_the_one_that_is_fetched(ray):
    jobs = ray.of_kind("Job")
    revisions = {
        variable["value"]
        for job in jobs
        for variable in job["spec"]["template"]["spec"]["containers"][0]["env"]
        if variable["name"] == "MODEL_REVISION"
    }
    assert yaml.safe_load(ray.config())["model"]["model"] == f"/models/{revisions.pop()}"
    assert not revisions
