"""The tenants document: what is accepted, and how a mistake is named."""

import pytest

from baton.errors import ConfigError
from router.tenants.document import parse, tenant_of
from router.tenants.keys import hash_key
from router.tenants.tenant import Tenant, TenantLimits

KEY = hash_key("first")


def _tenant(text: str) -> Tenant:
    document = parse(text, "tenants.yaml")
    return tenant_of(document.tenants[0], document.metrics_label)


def test_everything_that_can_be_said_of_a_tenant_arrives():
    tenant = _tenant(
        f"""
        tenants:
          - id: acme
            keys: [{KEY}]
            weight: 2
            slo_class: interactive
            requests_per_minute: 600
            request_burst: 20
            tokens_per_minute: 200000
            token_burst: 50000
            max_concurrency: 32
            kv_bytes: 64GiB
            models: [small, large]
            audit_content: true
            admin: true
        """
    )
    assert tenant == Tenant(
        tenant_id=tenant.tenant_id,
        weight=2.0,
        slo_class="interactive",
        tenant_class="interactive",
        limits=TenantLimits(
            requests_per_minute=600.0,
            request_burst=20.0,
            tokens_per_minute=200000.0,
            token_burst=50000.0,
            max_concurrency=32,
        ),
        kv_bytes=64 * 2**30,
        models=frozenset({"small", "large"}),
        cache_scope="tenant:acme",
        audit_content=True,
        admin=True,
    )


def test_a_tenant_has_a_cache_scope_of_its_own_unless_the_operator_lets_it_share():
    assert _tenant("tenants: [{id: a}]").cache_scope == "tenant:a"
    assert _tenant("tenants: [{id: a, share_cache: b}]").cache_scope == "shared:b"


def test_a_tenant_that_is_named_like_a_shared_scope_does_not_get_it():
    named = _tenant("tenants: [{id: group}]").cache_scope
    shared = _tenant("tenants: [{id: a, share_cache: group}]").cache_scope
    assert named != shared


def test_metrics_are_labelled_by_class_unless_the_operator_wants_tenants():
    assert _tenant("tenants: [{id: a, slo_class: batch}]").tenant_class == "batch"
    assert _tenant("{metrics_label: tenant, tenants: [{id: a}]}").tenant_class == "a"


@pytest.mark.parametrize("text", ["tenants: []", "{}"])
def test_a_document_may_describe_nobody(text):
    assert parse(text, "tenants.yaml").tenants == ()


@pytest.mark.parametrize("text", ["", "\n", "# tenants of the cluster\n"])
def test_an_empty_document_is_refused(text):
    with pytest.raises(ConfigError, match=r"tenants\.yaml: empty; .*tenants: \[\]"):
        parse(text, "tenants.yaml")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("tenants: [{id: a, weigth: 1}]", "tenants[0]: object contains unknown field weigth"),
        ("tenants: [{id: a, weight: x}]", "tenants[0].weight: expected float, got str"),
        ("tenants: [{id: a}, {id: a}]", "tenants[1].id: a is the id of tenants[0] already"),
        ("tenants: [{}]", "tenants[0]: object missing required field id"),
        ("tenants: [{id: 'a b'}]", "tenants[0].id: must be 1 to 64"),
        ("tenants: [{id: a, weight: 0}]", "tenants[0].weight: must be above 0"),
        ("tenants: [{id: a, weight: .nan}]", "tenants[0].weight: must be above 0"),
        (
            "tenants: [{id: a, requests_per_minute: -1}]",
            "requests_per_minute: must be from 0.000001",
        ),
        ("tenants: [{id: a, requests_per_minute: 1.0e-320}]", "requests_per_minute: must be from"),
        (
            "tenants: [{id: a, tokens_per_minute: 9223372036854775807}]",
            "to 1000000000000; no limit",
        ),
        (f"tenants: [{{id: a, max_concurrency: {'9' * 400}}}]", "max_concurrency: must be from 1"),
        ("tenants: [{id: a, request_burst: 5}]", "request_burst: needs requests_per_minute"),
        ("tenants: [{id: a, max_concurrency: 0}]", "max_concurrency: must be from 1 to"),
        ("tenants: [{id: a, kv_bytes: lots}]", "kv_bytes: must be a size such as 64GiB"),
        (f"tenants: [{{id: a, kv_bytes: {1 << 63}}}]", "kv_bytes: must be a size such as 64GiB"),
        ("tenants: {", "tenants.yaml: line 1:"),
        ("tenants: []\ntenants: []", "tenants.yaml: line 2: tenants is given twice"),
        ("tenants: [{id: a, id: b}]", "tenants.yaml: line 1: id is given twice"),
        ("tenants: [{id: a, weight: 2026-13-45}]", "line 1: not a valid timestamp"),
        ("[" * 5000, "tenants.yaml: nested too deeply"),
        (f"tenants: [{{id: a, kv_bytes: {'9' * 400}T}}]", "kv_bytes"),
        (f"tenants: [{{id: a, weight: {'9' * 400}}}]", "weight"),
        ("jwt: [{issuer: i, audience: a}]", "jwt[0].jwks_file: exactly one of"),
        (
            "jwt: [{issuer: i, audience: a, key_file: k, algorithms: [none]}]",
            "jwt[0].algorithms: must be some of",
        ),
        (
            "jwt: [{issuer: i, audience: a, key_file: k, algorithms: [HS256, RS256]}]",
            "jwt[0].algorithms: must be some of",
        ),
        ("jwt: [{issuer: i, audience: '', key_file: k}]", "jwt[0].audience: must not be empty"),
        (
            "jwt: [{issuer: i, audience: a, key_file: k}, {issuer: i, audience: b, key_file: k}]",
            "jwt[1].issuer: is that of jwt[0] already",
        ),
    ],
)
def test_a_mistake_is_named_with_its_place(text: str, complaint: str):
    with pytest.raises(ConfigError) as refused:
        parse(text, "tenants.yaml")
    assert refused.value.message.startswith("tenants.yaml: ")
    assert complaint in refused.value.message


def test_a_key_that_was_not_hashed_is_refused_and_not_repeated():
    with pytest.raises(ConfigError) as refused:
        parse("tenants: [{id: a, keys: [my-secret-key]}]", "tenants.yaml")
    assert "tenants[0].keys[0]" in refused.value.message
    assert "my-secret-key" not in refused.value.message


def test_two_tenants_cannot_have_one_key():
    with pytest.raises(ConfigError, match="is the key of tenants"):
        parse(f"tenants: [{{id: a, keys: ['{KEY}']}}, {{id: b, keys: ['{KEY}']}}]", "tenants.yaml")
