"""The schema of cluster.yaml as JSON Schema (2020-12), for editors and for checks where Baton is not installed.

It holds types, choices and names. A limit that JSON Schema has no word for stands in the setting's description; what
has to fit together between settings only `baton.config.load.check` knows.
"""

from typing import Any

import msgspec

from baton.config.rules import RULES
from baton.config.schema import BatonConfig
from baton.config.setting import SECTIONS, section_fields

_SIZE = {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*[kmgtKMGT]?[iI]?[bB]?\s*$"}


def json_schema() -> dict[str, Any]:
    """A new document each time."""
    _, named = msgspec.json.schema_components(
        (BatonConfig,), schema_hook=_of_object, ref_template="#/$defs/{name}"
    )
    defs: dict[str, Any] = dict(named)
    document = defs.pop("BatonConfig")
    for body in (document, *defs.values()):
        _close(body)
    for section, owner in SECTIONS.items():
        body = defs[owner.__name__]
        for name in section_fields(section):
            body["properties"][name] = _with_rules(f"{section}.{name}", body["properties"][name])
        # A section without settings is null in YAML.
        document["properties"][section] = {
            "anyOf": [{"$ref": f"#/$defs/{owner.__name__}"}, {"type": "null"}]
        }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "cluster.yaml",
        **document,
        "$defs": defs,
    }


def _of_object(_declared: type) -> dict[str, Any]:
    """Whatever another program reads, such as vLLM's own settings."""
    return {"description": "any value"}


def _close(body: dict[str, Any]) -> None:
    """Without names that the schema does not have. The defaults of whole sections repeat those of their settings."""
    body["additionalProperties"] = False
    body["description"] = " ".join(body.get("description", "").partition("\n\n")[0].split())
    body.pop("title", None)


def _with_rules(path: str, schema: dict[str, Any]) -> dict[str, Any]:
    default = {"default": schema.pop("default")} if "default" in schema else {}
    if "_bytes" in path:
        schema = {"anyOf": [*schema.pop("anyOf", [schema]), _SIZE]}
    rules = [rule for rule in RULES if rule.path == path]
    for rule in rules:
        if rule.choices:
            schema = {"enum": list(rule.choices)}
    demands = "; ".join(rule.demand for rule in rules)
    return {**schema, **default, **({"description": demands} if demands else {})}
