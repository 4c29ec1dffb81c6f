"""What schema validation does not see: that the manifests agree with each other, and with what the program takes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.config.load import load
from baton.config.ports import parse_ports
from baton.config.schema import BatonConfig
from baton_cluster.cli.main import main
from baton_cluster.launch.runtime_dir import RuntimeDir
from baton_worker.server import LIVE_PATH, READY_PATH
from router.http.auth import OPEN_PATHS
from tests.baton_cluster.cli.fake_pool import USAGE, FakePoolService, serving_pool
from tests.deploy.manifests import (
    CONFIG_FILE,
    KUSTOMIZE,
    OVERLAYS,
    ROOT,
    WORKERS,
    Container,
    Rendered,
    rendered,
)

PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
GIVEN = {"POD_NAME": "decode-0", "POD_IP": "10.0.0.7", "NODE_NAME": "host-1"}
SECRETS = {
    "/run/secrets/baton/cluster-secret": "5e" * 32,
    "/run/secrets/baton/api-keys": "one,two\n",
    "/run/secrets/redis/url": "rediss://baton:key@redis.baton.svc:6379?ssl_ca_certs=/run/secrets/redis/ca.crt",
}


def placed(cluster: Rendered, root: Path) -> Path:
    """The ConfigMap's file, with the model where this machine has a directory."""
    text = cluster.config().replace("/models/", f"{root}/models/")
    for line in text.splitlines():
        if line.strip().startswith("model: /"):
            Path(line.split()[1]).mkdir(parents=True, exist_ok=True)
    file = root / "cluster.yaml"
    file.write_text(text)
    return file


def configuration(cluster: Rendered, root: Path) -> BatonConfig:
    return load(placed(cluster, root), environment=[], flags=[])


def environment(container: Container) -> dict[str, str]:
    """As kubelet would make it."""
    made: dict[str, str] = {}
    for variable in container.spec.get("env", ()):
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            made[variable["name"]] = GIVEN[variable["name"]]
        elif "resourceFieldRef" in source:
            part, _, resource = source["resourceFieldRef"]["resource"].partition(".")
            made[variable["name"]] = str(container.spec["resources"][part][resource])
        else:
            made[variable["name"]] = _put_in(variable["value"], made)
    return made


def _put_in(text: str, variables: dict[str, str]) -> str:
    """`text` with references to variables that came before it."""
    for name, value in variables.items():
        text = text.replace(f"$({name})", value)
    assert "$(" not in text, text
    return text


def command(container: Container) -> list[str]:
    """Its arguments, with references to variables put in."""
    env = environment(container)
    return [_put_in(argument, env) for argument in container.spec["args"]]


def mounts(container: Container) -> dict[str, str]:
    return {one["mountPath"]: one["name"] for one in container.spec["volumeMounts"]}


def test_each_container_would_start(cluster, tmp_path, monkeypatch, capsys):
    check_containers(cluster, tmp_path, monkeypatch, capsys)


def check_containers(cluster, tmp_path, monkeypatch, capsys):
    """Each with its own arguments, environment and files."""
    config_file = placed(cluster, tmp_path)
    for one in cluster.processes():
        with monkeypatch.context() as patch:
            put_into_environment(one, tmp_path, patch)
            arguments = [arg.replace(CONFIG_FILE, str(config_file)) for arg in command(one)]
            assert main([*arguments, "--check"]) == 0, (one.label, capsys.readouterr().err)


def put_into_environment(container, root, patch):
    """Its variables, and the files of secrets that they name."""
    for name, value in environment(container).items():
        if name.endswith("_FILE"):
            assert str(Path(value).parent) in mounts(container), container.label
            file = root / value.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(SECRETS[value])
            value = str(file)
        patch.setenv(name, value)


def test_every_process_is_there(cluster):
    roles = sorted(one.spec["args"][1] for one in cluster.processes())
    assert roles == sorted(["router", "pool", *WORKERS])


def test_both_namespaces_have_the_same_configuration(cluster):
    assert cluster.config("baton") == cluster.config("baton-workers")


def test_secrets_come_as_files_and_stand_nowhere_else(cluster, tmp_path):
    config = configuration(cluster, tmp_path)
    assert not config.cluster.secret
    assert config.router.api_keys == ()
    assert not cluster.of_kind("Secret")
    for one in cluster.containers():
        for variable in one.spec.get("env", ()):
            assert "secretKeyRef" not in variable.get("valueFrom", {}), one.label
        assert not one.spec.get("envFrom"), one.label
        for volume in one.pod["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440, one.label


def test_a_workers_secrets_do_not_hold_the_keys_of_clients(cluster):
    for one in cluster.processes():
        (volume,) = (v for v in one.pod["volumes"] if v["name"] == "secrets")
        keys = {item["key"] for item in volume["secret"]["items"]}
        assert ("api-keys" in keys) == (one.spec["name"] == "router"), one.label


def test_routers_find_every_pool_by_its_headless_service(cluster, tmp_path):
    config = configuration(cluster, tmp_path).cluster
    assert (config.discovery, config.workers, config.pool_nodes) == ("dns", (), ())
    services = {one["metadata"]["name"]: one["spec"] for one in cluster.of_kind("Service")}
    assert sorted(config.worker_names) == sorted(f"{n}.baton-workers.svc:7001" for n in WORKERS)
    assert config.pool_node_names == ("pool.baton-workers.svc:7002",)
    for name in (*WORKERS, "pool"):
        assert services[name]["clusterIP"] == "None"
        assert services[name]["publishNotReadyAddresses"] is True
    for name in WORKERS:
        assert cluster.workloads()[name]["spec"]["serviceName"] == name


def test_workers_of_all_roles_differ_in_their_names_and_number_alone():
    def text(role: str) -> str:
        lines = (KUSTOMIZE / "base" / f"{role}.yaml").read_text().splitlines()[2:]
        return "\n".join(one for one in lines if "replicas:" not in one).replace(role, "ROLE")

    assert text("prefill") == text("decode") == text("hybrid")


def test_nobody_runs_with_more_rights_than_it_needs(cluster):
    for one in cluster.containers():
        own, of_pod = one.spec["securityContext"], one.pod["securityContext"]
        assert own["allowPrivilegeEscalation"] is False, one.label
        assert own["readOnlyRootFilesystem"] is True, one.label
        assert own["capabilities"]["drop"] == ["ALL"], one.label
        assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}, one.label
        assert of_pod["runAsNonRoot"] is True, one.label
        assert one.pod["automountServiceAccountToken"] is False, one.label
        assert one.pod["enableServiceLinks"] is False, one.label
        if not one.is_init:
            assert "runAsUser" not in own, one.label
            added = own["capabilities"].get("add", [])
            assert added in ([], ["IPC_LOCK"]), one.label


def test_locked_memory_is_only_where_pod_security_allows_it(cluster):
    levels = {
        one["metadata"]["name"]: one["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        for one in cluster.of_kind("Namespace")
    }
    assert levels == {"baton": "restricted", "baton-workers": "privileged"}
    for one in cluster.containers(init=False):
        if one.spec["securityContext"]["capabilities"].get("add"):
            assert one.workload["metadata"]["namespace"] == "baton-workers", one.label


def test_resources_are_asked_for_and_bounded(cluster):
    for one in cluster.containers():
        resources = one.spec["resources"]
        for part in ("requests", "limits"):
            assert {"cpu", "memory"} <= resources[part].keys(), one.label
        for name in resources["limits"].keys() | resources["requests"].keys():
            if "/" in name or name.startswith("hugepages"):
                assert resources["limits"].get(name) == resources["requests"].get(name), one.label


def test_workers_have_their_cores_and_memory_to_themselves(cluster):
    for one in cluster.processes():
        if one.spec["name"] == "worker":
            assert one.spec["resources"]["requests"] == one.spec["resources"]["limits"]
            threads = environment(one)["OMP_NUM_THREADS"]
            assert threads == environment(one)["BATON_ENGINE_NUM_THREADS"]
            assert threads.isdigit()


def test_a_pod_is_given_the_time_that_its_drain_takes(cluster, tmp_path):
    drain_s = configuration(cluster, tmp_path).cluster.drain_timeout_s
    for one in cluster.processes():
        pre_stop = one.spec.get("lifecycle", {}).get("preStop", {})
        before_s = float(pre_stop["exec"]["command"][1]) if pre_stop else 0.0
        drains = one.workload["metadata"]["name"] != "pool"
        assert bool(pre_stop) == drains
        needed_s = before_s + (drain_s if drains else 0)
        assert one.pod["terminationGracePeriodSeconds"] > needed_s, one.label


def test_probes_ask_what_is_there(cluster):
    for one in cluster.containers(init=False, jobs=False):
        ports = {port["name"]: port["containerPort"] for port in one.spec.get("ports", ())}
        assert {"livenessProbe", "readinessProbe"} <= one.spec.keys(), one.label
        for kind in PROBES:
            probe = one.spec.get(kind, {})
            if "httpGet" in probe:
                worker = probe["httpGet"]["port"] == "metrics"
                paths = (LIVE_PATH, READY_PATH) if worker else OPEN_PATHS
                assert probe["httpGet"]["path"] in paths, one.label
                assert probe["httpGet"]["port"] in ports, one.label
            if "tcpSocket" in probe:
                assert probe["tcpSocket"]["port"] in ports, one.label
            assert "grpc" not in probe, "kubelet has no certificate of the cluster"


def test_probes_that_are_commands_are_answered_in_their_containers(
    cluster, tmp_path, monkeypatch, capsys
):
    (pool,) = (one for one in cluster.processes() if one.spec["name"] == "pool")
    commands = [pool.spec[kind]["exec"]["command"] for kind in PROBES]
    runtime = RuntimeDir.claim(tmp_path / "pool")
    with serving_pool(FakePoolService(USAGE), runtime), monkeypatch.context() as patch:
        put_into_environment(pool, tmp_path, patch)
        for program, *arguments in commands:
            assert program == "baton"
            here = [str(runtime.path) if one == "/run/baton/pool" else one for one in arguments]
            assert main(here) == 0, capsys.readouterr().err
    runtime.release()


def test_whoever_drains_or_lacks_its_peers_is_not_restarted_for_it(cluster):
    alive = {"router": "/health", "worker": LIVE_PATH}
    for one in cluster.processes():
        if (path := alive.get(one.spec["name"])) is not None:
            assert one.spec["livenessProbe"]["httpGet"]["path"] == path, one.label
            assert one.spec["readinessProbe"]["httpGet"]["path"] == "/ready", one.label


def test_weights_have_ten_minutes(cluster):
    for one in cluster.processes():
        if one.spec["name"] == "worker":
            probe = one.spec["startupProbe"]
            assert probe["periodSeconds"] * probe["failureThreshold"] >= 600, one.label


def test_the_pool_runs_wherever_workers_do(cluster):
    pods = [cluster.workloads()[name]["spec"]["template"]["spec"] for name in ("pool", *WORKERS)]
    for pod in pods:
        assert pod.get("nodeSelector") == pods[0].get("nodeSelector")
        assert pod["tolerations"] == pods[0]["tolerations"]


def test_selectors_are_the_labels_of_pods(cluster):
    for one in cluster.workloads().values():
        wanted = one["spec"]["selector"]["matchLabels"]
        assert wanted.items() <= one["spec"]["template"]["metadata"]["labels"].items()
        for spread in one["spec"]["template"]["spec"].get("topologySpreadConstraints", ()):
            assert spread["labelSelector"]["matchLabels"] == wanted


def test_pods_are_spread_and_have_a_priority(cluster):
    classes = {one["metadata"]["name"] for one in cluster.of_kind("PriorityClass")}
    for one in cluster.workloads().values():
        pod = one["spec"]["template"]["spec"]
        assert pod["priorityClassName"] in classes
        if one["metadata"]["name"] in ("router", *WORKERS):
            keys = {spread["topologyKey"] for spread in pod["topologySpreadConstraints"]}
            assert "kubernetes.io/hostname" in keys
            if one["metadata"]["name"] == "router":
                assert "topology.kubernetes.io/zone" in keys


def test_each_service_leads_to_named_ports_of_pods_that_are_there(cluster):
    pods = [one["spec"]["template"] for one in cluster.workloads().values()]
    for service in cluster.of_kind("Service"):
        selector = service["spec"]["selector"].items()
        (pod,) = [one for one in pods if selector <= one["metadata"]["labels"].items()]
        names = {port["name"] for c in pod["spec"]["containers"] for port in c.get("ports", ())}
        for port in service["spec"]["ports"]:
            assert port["name"]
            assert port["targetPort"] in names


PICKER = "gateway-to-endpoint-picker"
"""The one policy for pods that are not of these manifests."""


def test_network_policies_name_ports_that_containers_have(cluster):
    ports = {p["containerPort"] for one in cluster.containers() for p in one.spec.get("ports", ())}
    opened: set[int] = set()
    for policy in cluster.of_kind("NetworkPolicy"):
        if policy["metadata"]["name"] == PICKER:
            continue
        for rule in policy["spec"].get("ingress", ()):
            opened |= {port["port"] for port in rule["ports"]}
    assert opened == ports, "every port is opened to somebody, and nothing else is"
    denied = {
        policy["metadata"]["namespace"]
        for policy in cluster.of_kind("NetworkPolicy")
        if policy["spec"]["podSelector"] == {} and "ingress" not in policy["spec"]
    }
    assert denied == {one["metadata"]["name"] for one in cluster.of_kind("Namespace")}


def test_listening_addresses_are_the_named_ports(cluster, tmp_path):
    config = configuration(cluster, tmp_path)
    kv = parse_ports(config.transfer.ports)
    assert kv is not None
    for one in cluster.processes():
        ports = {port["name"]: port["containerPort"] for port in one.spec["ports"]}
        if one.spec["name"] == "router":
            assert ports == {"http": config.router.port}
            continue
        env = environment(one)
        said = command(one)
        if one.spec["name"] == "worker":
            assert said[said.index("--listen") + 1] == f"{GIVEN['POD_IP']}:{ports['grpc']}"
            assert said[said.index("--metrics") + 1].endswith(f":{ports['metrics']}")
            role = said[1]
            reached = f"{GIVEN['POD_NAME']}.{role}.baton-workers.svc:{ports['grpc']}"
            assert said[said.index("--advertise") + 1] == reached
        else:
            assert env["BATON_POOL_PEER_ADDRESS"] == f"{GIVEN['POD_IP']}:{ports['peers']}"
            assert env["BATON_POOL_METRICS_ADDRESS"].endswith(f":{ports['metrics']}")
            assert said[said.index("--name") + 1] == GIVEN["POD_NAME"]
        assert ports["kv"] == kv.start, one.label


def test_network_policies_open_the_ports_of_transports(cluster, tmp_path):
    ports = parse_ports(configuration(cluster, tmp_path).transfer.ports)
    opened = {
        policy["metadata"]["name"]: range(port["port"], port["endPort"] + 1)
        for policy in cluster.of_kind("NetworkPolicy")
        for rule in policy["spec"].get("ingress", ())
        for port in rule.get("ports", ())
        if "endPort" in port
    }
    assert opened == dict.fromkeys(["workers-to-workers", "pool-to-pool"], ports)


def test_who_may_reach_whom(cluster):
    by_component = {
        policy["metadata"]["name"]: [
            source["podSelector"]["matchLabels"].get("app.kubernetes.io/component", "worker")
            for rule in policy["spec"].get("ingress", ())
            for source in rule.get("from", ())
            if "podSelector" in source
        ]
        for policy in cluster.of_kind("NetworkPolicy")
    }
    assert by_component == {
        "default-deny": [],
        "clients-to-router": [],
        "routers-and-pool-to-redis": ["router", "pool"],
        "routers-to-workers": ["router"],
        "workers-to-workers": ["worker"],
        "pool-to-pool": ["pool"],
        "routers-to-pool": ["router"],
        "monitoring-to-metrics": [],
    } | ({PICKER: []} if cluster.of_kind("InferencePool") else {})


def test_the_gateway_reaches_the_endpoint_picker_that_it_is_told_of(cluster):
    pools = cluster.of_kind("InferencePool")
    policies = [
        one for one in cluster.of_kind("NetworkPolicy") if one["metadata"]["name"] == PICKER
    ]
    assert len(pools) == len(policies) == cluster.overlay.startswith("prod-")
    for pool, policy in zip(pools, policies, strict=True):
        assert policy["metadata"]["namespace"] == pool["metadata"]["namespace"]
        (rule,) = policy["spec"]["ingress"]
        assert "from" not in rule, "gateways run where their own projects put them"
        asked = pool["spec"]["endpointPickerRef"]["port"]["number"]
        health = 9003  # of the extension's picker
        assert {port["port"] for port in rule["ports"]} == {asked, health}
        wanted = policy["spec"]["podSelector"]["matchLabels"].items()
        ours = [labels for one in cluster.objects for labels in pods_by_labels(one.get("spec"))]
        assert not [labels for labels in ours if wanted <= labels.items()]
        ((label, value),) = wanted
        guide = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
        assert f'"{label}":"{value}"' in guide, "whoever installs the picker sets it"


def test_a_budget_says_one_of_the_two_things_and_lets_hosts_be_emptied(cluster):
    budgets = cluster.of_kind("PodDisruptionBudget")
    assert {one["metadata"]["name"] for one in budgets} == {"router", *WORKERS}
    for budget in budgets:
        said = {"minAvailable", "maxUnavailable"} & budget["spec"].keys()
        assert said == {"maxUnavailable"}
        assert budget["spec"]["maxUnavailable"] >= 1


def pods_by_labels(node: Any) -> Iterator[dict[str, str]]:
    """Labels of each template of pods that is anywhere in an object."""
    if isinstance(node, list):
        for one in node:
            yield from pods_by_labels(one)
    elif isinstance(node, dict):
        template = node.get("template", {})
        if "containers" in template.get("spec", {}):
            yield template["metadata"]["labels"]
        for one in node.values():
            yield from pods_by_labels(one)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_budget_counts_pods_where_kubernetes_cannot_ask_how_many_there_should_be(overlay):
    """Of pods whose owner has no `scale`, as a RayCluster, it takes only a whole number that has to be available:
    with anything else no pod may be evicted.
    """
    made = rendered(overlay)
    for budget in made.of_kind("PodDisruptionBudget"):
        wanted = budget["spec"]["selector"]["matchLabels"].items()
        owners = {
            one["kind"]
            for one in made.objects
            for labels in pods_by_labels(one.get("spec"))
            if one["metadata"].get("namespace") == budget["metadata"]["namespace"]
            and wanted <= labels.items()
        }
        assert owners, budget["metadata"]["name"]
        if not owners <= {"Deployment", "StatefulSet"}:
            assert "maxUnavailable" not in budget["spec"], budget["metadata"]["name"]
            assert isinstance(budget["spec"]["minAvailable"], int)


def test_one_thing_says_how_many_pods_there_are(cluster, tmp_path):
    config = configuration(cluster, tmp_path)
    for one in cluster.of_kind("HorizontalPodAutoscaler"):
        target = cluster.workloads()[one["spec"]["scaleTargetRef"]["name"]]
        assert "replicas" not in target["spec"]
        assert 1 <= one["spec"]["minReplicas"] <= one["spec"]["maxReplicas"]
        assert one["spec"]["minReplicas"] >= config.tenants.routers
    scaled = [one["spec"] for one in cluster.of_kind("ScaledObject")]
    for spec in scaled:
        assert "replicas" not in cluster.workloads()[spec["scaleTargetRef"]["name"]]["spec"]
        assert 1 <= spec["minReplicaCount"] <= spec["maxReplicaCount"]
    assert not scaled or config.roles.planner != "on"


def test_what_is_mounted_is_a_volume_and_the_other_way_round(cluster):
    for workload in cluster.of_kind("Deployment", "StatefulSet", "DaemonSet", "Job"):
        pod = workload["spec"]["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        containers = [*pod["containers"], *pod.get("initContainers", ())]
        mounted = {mount["name"] for one in containers for mount in one["volumeMounts"]}
        assert mounted == volumes, workload["metadata"]["name"]


def test_workers_find_the_nodes_socket_where_the_node_makes_it(cluster, tmp_path):
    address = configuration(cluster, tmp_path).pool.address
    folder = str(Path(address.removeprefix("unix:")).parent)
    hosts = {}
    for one in cluster.processes():
        if folder in mounts(one):
            paths = {v["name"]: v.get("hostPath", {}).get("path") for v in one.pod["volumes"]}
            hosts[one.workload["metadata"]["name"]] = paths[mounts(one)[folder]]
    assert hosts.keys() == {"pool", *WORKERS}
    assert len(set(hosts.values())) == 1
    (pool,) = (one for one in cluster.processes() if one.spec["name"] == "pool")
    assert environment(pool)["BATON_CLUSTER_RUNTIME_DIR"] == folder


def test_a_nodes_memory_holds_its_slab(cluster, tmp_path):
    slab = configuration(cluster, tmp_path).pool.memory_bytes
    (pool,) = (one for one in cluster.processes() if one.spec["name"] == "pool")
    text = pool.spec["resources"]["limits"]["memory"]
    shift = {"Gi": 30, "Mi": 20}[text[-2:]]
    assert slab is not None
    assert int(text[:-2]) << shift > slab


def test_images_are_named_by_their_digests(cluster):
    for one in cluster.containers():
        name, _, digest = one.spec["image"].partition("@")
        assert name in ("baton", "redis"), one.label
        assert digest.startswith("sha256:"), one.label
        assert len(digest) == len("sha256:") + 64, one.label


def test_the_model_is_fetched_at_the_revision_that_is_served(cluster, tmp_path):
    jobs = [one for one in cluster.containers() if one.spec["name"] == "fetch"]
    model = yaml.safe_load(cluster.config()).get("model")
    if model is None:  # the demo model is in the image
        assert not jobs
        return
    assert len(jobs) == 2
    for one in jobs:
        env = environment(one)
        assert len(env["MODEL_REVISION"]) == 40
        assert model["model"] == f"/models/{env['MODEL_REVISION']}"
    for one in cluster.processes():
        claims = {
            v["persistentVolumeClaim"]["claimName"]
            for v in one.pod["volumes"]
            if "persistentVolumeClaim" in v
        }
        assert claims == (set() if one.spec["name"] == "pool" else {"models"}), one.label


def test_nodes_of_the_pool_and_routers_share_one_redis(cluster, tmp_path):
    config = configuration(cluster, tmp_path)
    assert config.pool.directory == "redis"
    assert config.pool.redis_url == config.tenants.redis_url == "redis://redis.baton.svc:6379"


def test_redis_is_asked_with_a_password_and_tls_where_it_is_production(cluster):
    (conf,) = (
        one["data"]["redis.conf"]
        for one in cluster.of_kind("ConfigMap")
        if one["metadata"]["name"].startswith("redis-config")
    )
    said = dict(line.split(" ", 1) for line in conf.splitlines() if line and line[0] != "#")
    assert said["maxmemory-policy"] == "noeviction"
    by_file = {
        one.spec["name"]: names
        for one in cluster.processes()
        if (names := {name for name in environment(one) if name.endswith("REDIS_URL_FILE")})
    }
    if not cluster.overlay.startswith("prod-"):
        assert (said["port"], by_file) == ("6379", {})
        return
    assert (said["port"], said["tls-port"]) == ("0", "6379")
    assert by_file == {
        "router": {"BATON_TENANTS_REDIS_URL_FILE"},
        "pool": {"BATON_POOL_REDIS_URL_FILE", "BATON_TENANTS_REDIS_URL_FILE"},
    }
    (redis,) = cluster.workloads()["redis"]["spec"]["template"]["spec"]["containers"]
    assert str(Path(said["aclfile"]).parent) in {one["mountPath"] for one in redis["volumeMounts"]}


@pytest.mark.parametrize(
    "component", sorted((KUSTOMIZE / "components").iterdir()), ids=lambda p: p.name
)
def test_every_component_is_used_by_an_overlay(component):
    used = [one.read_text() for one in (KUSTOMIZE / "overlays").glob("*/kustomization.yaml")]
    assert any(f"../../components/{component.name}\n" in text for text in used)
