"""The Kubernetes objects of deploy/, as they are written."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
BASE = ROOT / "deploy" / "k8s" / "base"
WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet")

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Container:
    """One container, and the pod that it is of."""

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
        return f"{self.workload['metadata']['name']}/{self.spec['name']}"


def kustomization(folder: Path = BASE) -> Object:
    """What its kustomization.yaml says."""
    said: Object = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return said


def objects() -> list[Object]:
    """Every object of the base."""
    files = [BASE / name for name in kustomization()["resources"]]
    return [one for file in files for one in yaml.safe_load_all(file.read_text())]


def of_kind(*kinds: str) -> list[Object]:
    """Objects of these kinds."""
    return [one for one in objects() if one["kind"] in kinds]


def workloads() -> dict[str, Object]:
    """By name."""
    return {one["metadata"]["name"]: one for one in of_kind(*WORKLOADS)}


def containers(*, init: bool = True) -> list[Container]:
    """Every container, by default those that only prepare a pod too."""
    found = []
    for workload in workloads().values():
        spec = workload["spec"]["template"]["spec"]
        found += [Container(workload, one, False) for one in spec["containers"]]
        if init:
            found += [Container(workload, one, True) for one in spec.get("initContainers", ())]
    return found
