"""What schema validation does not see: that the manifests agree with each other, and with what the program takes."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from baton.config.load import load
from baton.config.ports import parse_ports
from baton_cluster.cli.main import main
from baton_worker.server import LIVE_PATH, READY_PATH
from router.http.auth import OPEN_PATHS
from tests.deploy.manifests import (
    BASE,
    ROOT,
    WORKLOADS,
    Container,
    containers,
    kustomization,
    of_kind,
    workloads,
)

OURS = [one for one in containers(init=False) if one.spec["image"] == "baton"]
GIVEN = {"POD_NAME": "decode-0", "POD_IP": "10.0.0.7", "NODE_NAME": "host-1"}
SECRETS = {"cluster-secret": "5e" * 32, "api-keys": "one,two"}


def each(found: list[Container]):
    return pytest.mark.parametrize("container", found, ids=[one.label for one in found])


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """The ConfigMap's file, with a model where this machine has a directory."""
    (tmp_path / "models" / "model").mkdir(parents=True)
    file = tmp_path / "cluster.yaml"
    file.write_text((BASE / "cluster.yaml").read_text().replace("/models/", f"{tmp_path}/models/"))
    return file


def environment(container: Container) -> dict[str, str]:
    """As kubelet would make it."""
    made = {}
    for variable in container.spec["env"]:
        source = variable.get("valueFrom", {})
        if "secretKeyRef" in source:
            made[variable["name"]] = SECRETS[source["secretKeyRef"]["key"]]
        elif "fieldRef" in source:
            made[variable["name"]] = GIVEN[variable["name"]]
        else:
            made[variable["name"]] = _put_in(variable["value"], made)
    return made


def _put_in(text: str, variables: dict[str, str]) -> str:
    """`text` with references to variables that came before it."""
    for name, value in variables.items():
        text = text.replace(f"$({name})", value)
    assert "$(" not in text, text
    return text


def command(container: Container, config_file: Path) -> list[str]:
    """Its arguments, with references to variables put in."""
    env = environment(container)
    arguments = [_put_in(argument, env) for argument in container.spec["args"]]
    return [one.replace("/etc/baton/cluster.yaml", str(config_file)) for one in arguments]


@each(OURS)
def test_each_container_would_start(container, config_file, monkeypatch, capsys):
    for name, value in environment(container).items():
        monkeypatch.setenv(name, value)
    assert main([*command(container, config_file), "--check"]) == 0, capsys.readouterr().err


def test_the_config_map_is_taken_by_the_programs_own_loader(config_file):
    config = load(config_file, environment=[], flags=[])
    assert config.pool.enabled
    assert not config.cluster.secret, "secrets come by reference"
    assert config.router.api_keys == ()


def test_routers_know_every_worker_and_no_other(config_file):
    cluster = load(config_file, environment=[], flags=[]).cluster
    there = [
        f"{one['spec']['serviceName']}.{one['metadata']['namespace']}.svc:7001"
        for one in workloads().values()
        if one["kind"] == "StatefulSet"
    ]
    assert (cluster.discovery, cluster.workers) == ("dns", ())
    assert sorted(cluster.worker_names) == sorted(there)
    services = {
        f"{one['metadata']['name']}.{one['metadata']['namespace']}.svc:7001": one["spec"]
        for one in of_kind("Service")
    }
    for name in cluster.worker_names:
        assert services[name]["clusterIP"] == "None"
        assert services[name]["publishNotReadyAddresses"] is True


@each(containers())
def test_nobody_runs_with_more_rights_than_it_needs(container):
    spec, pod = container.spec, container.pod
    own = spec["securityContext"]
    assert own["allowPrivilegeEscalation"] is False
    assert own["readOnlyRootFilesystem"] is True
    assert own["capabilities"]["drop"] == ["ALL"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    if not container.is_init:
        assert "runAsUser" not in own
        assert "add" not in own["capabilities"]


@each(containers())
def test_resources_are_asked_for_and_bounded(container):
    resources = container.spec["resources"]
    assert {"cpu", "memory"} <= resources["requests"].keys()
    assert "memory" in resources["limits"]
    assert resources["limits"].get("nvidia.com/gpu") == resources["requests"].get("nvidia.com/gpu")


@each(OURS)
def test_a_pod_is_given_the_time_that_its_drain_takes(container, config_file):
    drain_s = load(config_file, environment=[], flags=[]).cluster.drain_timeout_s
    pre_stop = container.spec.get("lifecycle", {}).get("preStop", {})
    before_s = float(pre_stop["exec"]["command"][1]) if pre_stop else 0.0
    drains = container.workload["metadata"]["name"] != "pool"
    assert container.pod["terminationGracePeriodSeconds"] > before_s + (drain_s if drains else 0)


@each(containers(init=False))
def test_probes_ask_what_is_there(container):
    ports = {port["name"]: port["containerPort"] for port in container.spec.get("ports", ())}
    assert "livenessProbe" in container.spec
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = container.spec.get(kind, {})
        if "httpGet" in probe:
            paths = (LIVE_PATH, READY_PATH) if probe["httpGet"]["port"] == "metrics" else OPEN_PATHS
            assert probe["httpGet"]["path"] in paths
            assert probe["httpGet"]["port"] in ports
        if "tcpSocket" in probe:
            assert probe["tcpSocket"]["port"] in ports
        assert "grpc" not in probe, "kubelet has no certificate of the cluster"


@each(containers(init=False))
def test_whoever_drains_is_not_restarted_for_it(container):
    probe = container.spec["livenessProbe"]
    asked = probe.get("httpGet", {})
    assert asked.get("port") != "metrics" or asked["path"] == LIVE_PATH


def test_the_pool_runs_wherever_workers_do():
    pods = [workloads()[name]["spec"]["template"]["spec"] for name in ("pool", "prefill", "decode")]
    for pod in pods:
        assert pod["nodeSelector"] == pods[0]["nodeSelector"]
        assert pod["tolerations"] == pods[0]["tolerations"]


def test_whoever_tells_metrics_can_be_asked_for_them():
    open_ports = {
        (policy["metadata"]["namespace"], port["port"])
        for policy in of_kind("NetworkPolicy")
        for rule in policy["spec"].get("ingress", ())
        for port in rule.get("ports", ())
    }
    for one in containers(init=False):
        for port in one.spec.get("ports", ()):
            if port["name"] == "metrics":
                namespace = one.workload["metadata"]["namespace"]
                assert (namespace, port["containerPort"]) in open_ports


def test_selectors_are_the_labels_of_pods():
    for one in workloads().values():
        wanted = one["spec"]["selector"]["matchLabels"]
        assert wanted.items() <= one["spec"]["template"]["metadata"]["labels"].items()


def test_each_service_leads_to_named_ports_of_pods_that_are_there():
    pods = [one["spec"]["template"] for one in workloads().values()]
    for service in of_kind("Service"):
        selector = service["spec"]["selector"].items()
        (pod,) = [one for one in pods if selector <= one["metadata"]["labels"].items()]
        names = {port["name"] for c in pod["spec"]["containers"] for port in c.get("ports", ())}
        for port in service["spec"]["ports"]:
            assert port["name"]
            assert port["targetPort"] in names


def test_network_policies_name_ports_that_containers_have():
    ports = {port["containerPort"] for one in containers() for port in one.spec.get("ports", ())}
    for policy in of_kind("NetworkPolicy"):
        for rule in policy["spec"].get("ingress", ()):
            assert {port["port"] for port in rule.get("ports", ())} <= ports
    denied = {
        policy["metadata"]["namespace"]
        for policy in of_kind("NetworkPolicy")
        if policy["spec"]["podSelector"] == {} and "ingress" not in policy["spec"]
    }
    assert denied == {one["metadata"]["name"] for one in of_kind("Namespace")}


def test_a_budget_says_one_of_the_two_things():
    for budget in of_kind("PodDisruptionBudget"):
        assert len({"minAvailable", "maxUnavailable"} & budget["spec"].keys()) == 1


@each(containers())
def test_what_is_mounted_is_a_volume_and_the_other_way_round(container):
    volumes = {volume["name"] for volume in container.pod["volumes"]}
    mounted = {
        mount["name"]
        for one in containers()
        if one.workload == container.workload
        for mount in one.spec["volumeMounts"]
    }
    assert mounted == volumes


def test_workers_find_the_nodes_socket_where_the_node_makes_it(config_file):
    address = load(config_file, environment=[], flags=[]).pool.address
    folder = str(Path(address.removeprefix("unix:")).parent)
    hosts = {}
    for one in containers(init=False):
        mounts = {mount["mountPath"]: mount["name"] for mount in one.spec["volumeMounts"]}
        if folder in mounts:
            paths = {v["name"]: v.get("hostPath", {}).get("path") for v in one.pod["volumes"]}
            hosts[one.workload["metadata"]["name"]] = paths[mounts[folder]]
    assert hosts.keys() == {"pool", "prefill", "decode"}
    assert len(set(hosts.values())) == 1
    pool = next(one for one in OURS if one.label == "pool/pool")
    assert environment(pool)["BATON_CLUSTER_RUNTIME_DIR"] == folder


def test_network_policies_open_the_ports_of_transports(config_file):
    ports = parse_ports(load(config_file, environment=[], flags=[]).transfer.ports)
    opened = {
        policy["metadata"]["name"]: range(port["port"], port["endPort"] + 1)
        for policy in of_kind("NetworkPolicy")
        for rule in policy["spec"].get("ingress", ())
        for port in rule.get("ports", ())
        if "endPort" in port
    }
    assert opened == dict.fromkeys(
        ["prefill-to-decode", "decode-to-prefill", "pool-to-pool"], ports
    )


def test_nodes_of_the_pool_have_names_and_addresses_of_their_own(config_file):
    pool = next(one for one in OURS if one.label == "pool/pool")
    (port,) = (one["containerPort"] for one in pool.spec["ports"] if one["name"] == "peers")
    assert environment(pool)["BATON_POOL_PEER_ADDRESS"] == f"{GIVEN['POD_IP']}:{port}"
    arguments = command(pool, config_file)
    assert arguments[arguments.index("--name") + 1] == GIVEN["POD_NAME"]


def test_nodes_of_the_pool_reach_each_other_and_their_directory(config_file):
    directory = load(config_file, environment=[], flags=[]).pool
    assert (directory.directory, directory.redis_url) == ("redis", "redis://redis.baton.svc:6379")
    admitted = {
        policy["metadata"]["name"]: [
            source["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            for rule in policy["spec"].get("ingress", ())
            for source in rule.get("from", ())
            if "podSelector" in source
        ]
        for policy in of_kind("NetworkPolicy")
    }
    assert admitted["pool-to-pool"] == ["pool"]
    assert admitted["routers-and-pool-to-redis"] == ["router", "pool"]


def test_a_nodes_memory_holds_its_slab(config_file):
    slab = load(config_file, environment=[], flags=[]).pool.memory_bytes
    (pool,) = workloads()["pool"]["spec"]["template"]["spec"]["containers"]
    assert slab is not None
    assert int(pool["resources"]["requests"]["memory"].removesuffix("Gi")) << 30 > slab


def test_images_are_pinned():
    tags = {image["name"]: image["newTag"] for image in kustomization()["images"]}
    for one in containers():
        name, _, tag = one.spec["image"].partition(":")
        assert tags.get(name, tag) not in ("", "latest")


def test_the_image_is_built_from_files_that_are_here():
    lines = (ROOT / "deploy" / "docker" / "Dockerfile").read_text().splitlines()
    copied = [
        line.split()[1:-1] for line in lines if line.startswith("COPY") and "--from" not in line
    ]
    assert all((ROOT / source).exists() for sources in copied for source in sources)
    assert 'ENTRYPOINT ["baton"]' in lines
    assert any(line.startswith("USER 10001") for line in lines)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", ["base", "overlays/cpu"])
def test_kustomize_renders(folder):
    shown = subprocess.run(
        ["kubectl", "kustomize", str(BASE.parent / folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert shown.returncode == 0, shown.stderr
    kinds = [one["kind"] for one in yaml.safe_load_all(shown.stdout)]
    assert set(WORKLOADS) <= set(kinds)
