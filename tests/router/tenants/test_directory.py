"""Whose request it is: by key, by token, or everybody's."""

import pytest

from baton.errors import AuthenticationError
from router.tenants.directory import TenantDirectory
from router.tenants.document import parse
from router.tenants.keys import hash_key, key_id
from router.tenants.tenant import ANONYMOUS
from tests.router.tenants.test_web_tokens import jwks, token

JWT = "jwt: [{issuer: 'https://login.example', audience: baton, algorithms: [ES256], jwks_file: f}]"


def directory(text: str, *, api_keys: tuple[str, ...] = ()) -> TenantDirectory:
    made = TenantDirectory(api_keys, described=True)
    made.replace(made.register_of(parse(text, "tenants.yaml"), lambda _: jwks("k1")))
    return made


def test_without_keys_and_tenants_everybody_is_the_anonymous_tenant():
    assert TenantDirectory().identify(None).tenant is ANONYMOUS
    assert TenantDirectory().identify("whatever").tenant is ANONYMOUS


def test_a_plain_key_is_the_anonymous_tenants():
    made = TenantDirectory(["k"])
    assert made.identify("k").tenant is ANONYMOUS
    assert made.identify("k").key_id == key_id(hash_key("k"))


@pytest.mark.parametrize("credential", [None, "", "x", "a.b.c", "k" * 10_000])
def test_where_there_are_keys_nobody_else_comes_in(credential: str | None):
    for made in (
        TenantDirectory(["k"]),
        directory("{}"),
        directory("tenants: [{id: a}]"),
        directory(JWT),
    ):
        with pytest.raises(AuthenticationError):
            made.identify(credential)


def test_each_key_finds_its_tenant():
    made = directory(
        f"tenants: [{{id: a, keys: ['{hash_key('1')}', '{hash_key('2')}']}},"
        f" {{id: b, keys: ['{hash_key('3')}']}}]",
        api_keys=("4",),
    )
    found = {key: made.identify(key).tenant.tenant_id for key in "1234"}
    assert found == {"1": "a", "2": "a", "3": "b", "4": "anonymous"}


def test_a_token_finds_the_tenant_that_it_names():
    made = directory(f"{{tenants: [{{id: acme}}], {JWT}}}")
    caller = made.identify(token())
    assert (caller.tenant.tenant_id, caller.key_id) == ("acme", "jwt:someone")


def test_a_good_token_for_a_tenant_that_is_not_described_is_refused():
    made = directory(f"{{tenants: [{{id: acme}}], {JWT}}}")
    with pytest.raises(AuthenticationError, match="not known"):
        made.identify(token(tenant="other"))


def test_a_tenant_that_was_removed_is_out_and_what_it_had_under_way_keeps_its_tenant():
    made = directory(f"tenants: [{{id: a, keys: ['{hash_key('1')}'], weight: 5}}, {{id: b}}]")
    before = made.identify("1")
    made.replace(made.register_of(parse("tenants: [{id: b}]", "tenants.yaml"), str))
    with pytest.raises(AuthenticationError):
        made.identify("1")
    assert before.tenant.weight == 5
