"""Every object against the schema of its kind, made strict: a field that the kind does not know fails.

Kinds of Kubernetes itself come from the package `kubernetes-validate`. Schemas of custom resources are read where they
lie beside the checkout, in `shared/crds`, or where BATON_CRD_SCHEMAS says: files as their projects publish them.
"""

import copy
import functools
import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import OVERLAYS, ROOT, Object, need_module, rendered

VERSION = "1.32"


def schema_folder() -> Path:
    """Where schemas of custom resources are."""
    named = os.environ.get("BATON_CRD_SCHEMAS")
    beside = (parent / "shared" / "crds" for parent in ROOT.parents)
    found = Path(named) if named else next((one for one in beside if one.is_dir()), None)
    if found is None or not found.is_dir():
        pytest.skip(
            "schemas of custom resources are not here: BATON_CRD_SCHEMAS names their folder"
        )
    return found


@functools.cache
def schema_of(api_version: str, kind: str) -> Any:
    """The strict schema of a custom resource, or None."""
    group, _, version = api_version.partition("/")
    of_catalog = schema_folder() / f"{group}_{kind.lower()}_{version}.json"
    if of_catalog.is_file():
        return strict(json.loads(of_catalog.read_text()), is_top=True)
    for file in schema_folder().glob(f"{group}_{kind.lower()}s.yaml"):
        crd = yaml.load(file.read_text(), Loader=yaml.CSafeLoader)
        assert (crd["spec"]["group"], crd["spec"]["names"]["kind"]) == (group, kind)
        for one in crd["spec"]["versions"]:
            if one["name"] == version:
                return strict(one["schema"]["openAPIV3Schema"], is_top=True)
    return None


def strict(schema: Any, *, is_top: bool = False) -> Any:
    """`schema` with `additionalProperties: false` wherever it lists properties and does not say
    that there are others.
    """
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(value) for name, value in schema.items()}
    if is_top:
        made["properties"] = {"apiVersion": {}, "kind": {}} | made["properties"] | {"metadata": {}}
    open_ended = made.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in made
    if isinstance(made.get("properties"), dict) and made.get("type") == "object" and not open_ended:
        made["additionalProperties"] = False
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return made


def problem(one: Object) -> str | None:
    """What is wrong with an object, or None."""
    if (schema := schema_of(one["apiVersion"], one["kind"])) is not None:
        jsonschema: Any = importlib.import_module("jsonschema")
        errors = jsonschema.Draft7Validator(schema).iter_errors(one)
        error = jsonschema.exceptions.best_match(errors)
        return None if error is None else f"{error.json_path}: {error.message}"
    validate: Any = importlib.import_module("kubernetes_validate")
    try:
        validate.validate(one, VERSION, strict=True)
    except validate.ValidationError as error:
        return f"{error.json_path}: {error.message}"
    return None


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_is_valid(overlay: str):
    need_module("kubernetes_validate")
    for one in rendered(overlay).objects:
        label = f"{one['kind']}/{one['metadata']['name']}"
        assert problem(one) is None, label


OF_EVERY_SCHEMA = (
    "StatefulSet",
    "NetworkPolicy",
    "HorizontalPodAutoscaler",
    "ScaledObject",
    "HTTPRoute",
    "InferencePool",
    "PodMonitor",
    "ServiceMonitor",
    "PrometheusRule",
)


@pytest.mark.parametrize(
    ("overlay", "kind"),
    [*(("prod-ib", kind) for kind in OF_EVERY_SCHEMA), ("kuberay", "RayCluster")],
)
def test_an_unknown_field_is_found(overlay, kind):
    need_module("kubernetes_validate")
    wrong = copy.deepcopy(rendered(overlay).of_kind(kind)[0])
    wrong["spec"]["noSuchField"] = 1
    assert "noSuchField" in (problem(wrong) or "")
