"""The chart renders the objects that kustomize does, and takes no values but its own."""

import importlib
import re
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import OVERLAYS, ROOT, WORKLOADS, Object, need_module, rendered

CHART = ROOT / "deploy" / "helm" / "baton"
CONFIG = "baton.example.com/cluster.yaml"
_JOB = re.compile(r"fetch-model-[0-9a-f]{8}")


def helm() -> Any:
    """Helm as a library."""
    need_module("helm_python")
    return importlib.import_module("helm_python.chart")


def values(overlay: str) -> Any:
    return yaml.safe_load((CHART / "values" / f"{overlay}.yaml").read_text())


def by_chart(given: Any) -> list[Object]:
    """What `helm install` would apply."""
    files = helm().Chart.load(CHART).render(given, name="baton", namespace="baton")
    documents = (one for file in files.values() for one in yaml.safe_load_all(file))
    return [one for one in documents if one]


def comparable(objects: list[Object]) -> dict[tuple[str, str, str], Object]:
    """By kind and name, without how each tool has pods keep the configuration that they were made with: in a ConfigMap
    whose name has its hash, or in an annotation of theirs; and without what the chart adds to a Job's name, so that it
    may stay for longer.
    """
    hashed = {
        one["metadata"]["name"]: one["metadata"]["name"].rpartition("-")[0]
        for one in objects
        if one["kind"] == "ConfigMap" and one["metadata"]["name"].count("-") == 2
    }
    made = {}
    for one in objects:
        text = yaml.safe_dump(one)
        for name, plain in hashed.items():
            text = text.replace(name, plain)
        copy = yaml.safe_load(text)
        for template in templates(copy):
            annotations = template["metadata"].get("annotations", {})
            annotations.pop("checksum/config", None)
            if (config := annotations.pop(CONFIG, None)) is not None:
                read = in_a_config_map(template, config, copy["metadata"]["namespace"])
                made["ConfigMap", read["metadata"]["namespace"], "baton-config"] = read
            if not annotations:
                template["metadata"].pop("annotations", None)
        if copy["kind"] == "ConfigMap" and "cluster.yaml" in copy["data"]:
            copy["data"]["cluster.yaml"] = yaml.safe_load(copy["data"]["cluster.yaml"])
        of = copy["metadata"]
        if copy["kind"] == "Job":
            of["name"] = _JOB.sub("fetch-model", of["name"])
            del copy["spec"]["ttlSecondsAfterFinished"]  # kubectl's is in the way of the next one
        made[copy["kind"], of.get("namespace", ""), of["name"]] = copy
    return made


def templates(one: Object) -> list[Object]:
    """Of the pods of an object."""
    spec = one.get("spec", {})
    if one["kind"] == "RayCluster":
        return [spec["headGroupSpec"]["template"], spec["workerGroupSpecs"][0]["template"]]
    return [spec["template"]] if one["kind"] in WORKLOADS else []


def in_a_config_map(template: Object, config: str, namespace: str) -> Object:
    """Has pods mount a ConfigMap in place of their own annotation, and gives that."""
    (volume,) = (one for one in template["spec"]["volumes"] if one["name"] == "config")
    (item,) = volume.pop("downwardAPI")["items"]
    assert item == {
        "path": "cluster.yaml",
        "fieldRef": {"fieldPath": f"metadata.annotations['{CONFIG}']"},
    }
    volume["configMap"] = {"name": "baton-config"}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "baton-config", "namespace": namespace},
        "data": {"cluster.yaml": yaml.safe_load(config)},
    }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_chart_renders_what_kustomize_does(overlay):
    chart = comparable(by_chart(values(overlay)))
    overlays = comparable(list(rendered(overlay).objects))
    assert chart.keys() == overlays.keys()
    for key, one in overlays.items():
        assert chart[key] == one, key


def test_a_job_of_another_image_or_model_is_another_job():
    """A Job's template cannot be changed: `helm upgrade` and `helm rollback` would fail while it is there."""

    def jobs(**changed: Any) -> set[tuple[str, str]]:
        made = by_chart(values("prod-ib") | changed)
        return {
            (one["metadata"]["namespace"], one["metadata"]["name"])
            for one in made
            if one["kind"] == "Job"
        }

    image = {"baton": {"digest": "sha256:" + "1" * 64}}
    revision = values("prod-ib")["modelCache"] | {"revision": "1" * 40}
    every = [jobs(), jobs(images=image), jobs(modelCache=revision)]
    assert [len(one) for one in every] == [2, 2, 2]
    assert len(set.union(*every)) == 6
    assert jobs() == jobs(keda={"enabled": True, "maxReplicas": 99})


def test_no_pod_reads_a_configuration_that_can_change_under_it():
    """An upgrade that fails must not reach those that it has not replaced when they start again."""
    names = [one["metadata"]["name"] for one in by_chart({}) if one["kind"] == "ConfigMap"]
    assert names == ["redis-config"]


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize(("drain_s", "grace_s"), [(600, 630), (0.5, 31), (None, 90)])
def test_a_pod_is_given_the_time_that_its_drain_takes(overlay, drain_s, grace_s):
    given = values(overlay)
    given.setdefault("config", {}).setdefault("cluster", {})["drain_timeout_s"] = drain_s
    pods = [
        template["spec"]
        for one in by_chart(given)
        for template in templates(one)
        if one["metadata"]["name"] in ("router", "prefill", "decode", "hybrid", "baton")
    ]
    assert pods
    assert {pod["terminationGracePeriodSeconds"] for pod in pods} == {grace_s}
    waits = [
        float(container["lifecycle"]["preStop"]["exec"]["command"][1])
        for pod in pods
        for container in pod["containers"]
        if container["name"] == "ray-head"
    ]
    assert all((drain_s or 60) < wait_s < grace_s for wait_s in waits)


def test_there_are_values_for_every_overlay_and_no_other():
    assert sorted(file.stem for file in (CHART / "values").iterdir()) == sorted(OVERLAYS)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_release_beside_another_is_the_same_and_shares_nothing_with_it(overlay):
    other = {"namespaces": {"routers": "later", "workers": "later-workers"}}
    first, second = by_chart(values(overlay)), by_chart(values(overlay) | other)
    assert not comparable(first).keys() & comparable(second).keys()
    assert not host_paths(first) & host_paths(second)
    renamed = yaml.safe_load(yaml.safe_dump(second).replace("later", "baton"))
    assert comparable(renamed) == comparable(first)


def test_the_budget_of_ray_follows_the_number_of_its_workers():
    given = values("kuberay")
    given["kuberay"]["replicas"] = 5
    (budget,) = (
        one["spec"]
        for one in by_chart(given)
        if (one["kind"], one["metadata"]["name"]) == ("PodDisruptionBudget", "ray")
    )
    assert budget["minAvailable"] == 4


def host_paths(objects: list[Object]) -> set[str]:
    """What pods mount of their hosts."""
    templates = [one["spec"]["template"] for one in objects if one["kind"] in WORKLOADS]
    volumes = [volume for one in templates for volume in one["spec"].get("volumes", ())]
    return {volume["hostPath"]["path"] for volume in volumes if "hostPath" in volume}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_lint_has_nothing_to_say(overlay):
    report = helm().lint(CHART, values(overlay), strict=True)
    assert not report["errors"]
    assert not [one for one in report["messages"] if one["severity"] > 1]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"no_such_value": 1}, "no_such_value"),
        ({"router": {"replicas": 2}}, "replicas"),
        ({"workers": {"replicas": {"prefil": 1}}}, "prefil"),
        ({"workers": {"env": {"BATON_CLUSTER_SECRET": "5e"}}}, "BATON_CLUSTER_SECRET"),
        ({"images": {"baton": {"digest": "latest"}}}, "digest"),
        ({"images": {"baton": {"digest": "", "tag": "latest"}}}, "tag"),
        ({"images": {"baton": {"digest": ""}}}, "give a digest or a tag"),
        ({"modelCache": {"revision": "main"}}, "revision"),
        ({"namespaces": {"routers": "Baton"}}, "routers"),
        ({"namespaces": {"workers": "baton"}}, "routers and workers need two"),
    ],
)
def test_a_value_that_is_none_is_refused_by_its_name(wrong, named):
    with pytest.raises(Exception, match=named):
        by_chart(wrong)
