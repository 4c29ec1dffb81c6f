"""The schema of cluster.yaml, held to what `load` takes."""

import jsonschema_rs
import msgspec
import pytest

from baton.config.json_schema import json_schema
from baton.config.load import load, to_json
from baton.config.schema import BatonConfig

VALIDATOR = jsonschema_rs.Draft202012Validator(json_schema())


def test_it_is_a_schema_and_the_defaults_satisfy_it():
    assert jsonschema_rs.meta.is_valid(json_schema())
    VALIDATOR.validate(msgspec.json.decode(to_json(BatonConfig())))


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"router": None},
        {"engine": {"kv_cache_memory_bytes": "4GiB", "vllm": {"any": [1]}}},
        {"router": {"slo_classes": {"standard": {"ttft_s": 2}}}},
    ],
)
def test_what_is_in_order_satisfies_it(document):
    VALIDATOR.validate(document)


@pytest.mark.parametrize(
    "document",
    [
        {"no_such": {}},
        {"router": {"prot": 1}},
        {"router": {"slo_classes": {"standard": {"ttft": 2}}}},
        {"router": {"port": "abc"}},
        {"engine": {"device": "tpu"}},
        {"engine": {"kv_cache_memory_bytes": "much"}},
    ],
)
def test_what_is_refused_does_not(document, tmp_path):
    assert not VALIDATOR.is_valid(document)
    file = tmp_path / "cluster.yaml"
    file.write_bytes(msgspec.yaml.encode(document))
    with pytest.raises(Exception, match=next(iter(document))):
        load(file)
