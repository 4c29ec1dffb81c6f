"""The Kubernetes objects of deploy/, rendered as an operator would, and read from there."""

import functools
import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
KUSTOMIZE = ROOT / "deploy" / "k8s"
OVERLAYS = tuple(sorted(one.name for one in (KUSTOMIZE / "overlays").iterdir()))
ON_RAY = ("kuberay",)
"""Overlays whose workers Ray places: they have no StatefulSets, and what these promise is not asked of them."""
WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet", "Job")
WORKERS = ("prefill", "decode", "hybrid")
CONFIG_FILE = "/etc/baton/cluster.yaml"

Object = dict[str, Any]


def need(is_there: object, tool: str) -> None:
    """Skips the test where `tool` is missing; where CI runs, which sets BATON_K8S_TOOLS=required, that is a failure."""
    if is_there:
        return
    if os.environ.get("BATON_K8S_TOOLS") == "required":
        pytest.fail(f"{tool} is missing: make k8s-tools")
    pytest.skip(f"{tool} is not installed: make k8s-tools")


def need_module(name: str) -> None:
    """The same of a module."""
    need(importlib.util.find_spec(name), name)


def kubectl() -> str:
    """Of the machine, or what `make k8s-tools` has put beside the environment's own programs."""
    found = shutil.which("kubectl") or shutil.which("kubectl", path=str(ROOT / ".venv" / "bin"))
    need(found, "kubectl")
    assert found is not None
    return found


@dataclass(frozen=True, slots=True)
class Container:
    """One container, and the workload that it is of."""

    workload: Object
    spec: Object
    is_init: bool

    @property
    def pod(self) -> Object:
        """The pod's spec."""
        spec: Object = self.workload["spec"]["template"]["spec"]
        return spec

    @property
    def label(self) -> str:
        """For whoever reads a failure."""
        metadata = self.workload["metadata"]
        return f"{metadata['namespace']}/{metadata['name']}/{self.spec['name']}"


@dataclass(frozen=True, slots=True)
class Rendered:
    """What one overlay makes."""

    overlay: str
    objects: tuple[Object, ...]

    def of_kind(self, *kinds: str) -> list[Object]:
        """Objects of these kinds."""
        return [one for one in self.objects if one["kind"] in kinds]

    def workloads(self) -> dict[str, Object]:
        """What runs on and on, by name."""
        return {one["metadata"]["name"]: one for one in self.of_kind(*WORKLOADS[:-1])}

    def containers(self, *, init: bool = True, jobs: bool = True) -> list[Container]:
        """Every container, by default also those that only prepare a pod or end by themselves."""
        found = []
        for workload in self.of_kind(*(WORKLOADS if jobs else WORKLOADS[:-1])):
            spec = workload["spec"]["template"]["spec"]
            found += [Container(workload, one, False) for one in spec["containers"]]
            if init:
                found += [Container(workload, one, True) for one in spec.get("initContainers", ())]
        return found

    def processes(self) -> list[Container]:
        """Containers that run `baton run ROLE`."""
        return [
            one for one in self.containers(init=False) if one.spec.get("args", [""])[0] == "run"
        ]

    def config(self, namespace: str = "baton") -> str:
        """The text of cluster.yaml as the pods of a namespace find it."""
        for one in self.of_kind("ConfigMap"):
            of = one["metadata"]
            if of["namespace"] == namespace and of["name"].startswith("baton-config"):
                text: str = one["data"]["cluster.yaml"]
                return text
        raise AssertionError(f"no ConfigMap baton-config in {namespace}")


@functools.cache
def rendered(overlay: str) -> Rendered:
    """What `kubectl apply -k` would apply."""
    shown = subprocess.run(
        [kubectl(), "kustomize", str(KUSTOMIZE / "overlays" / overlay)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert shown.returncode == 0, shown.stderr
    return Rendered(overlay, tuple(yaml.safe_load_all(shown.stdout)))
