"""The gate: whose request it is, and what that means for what stands behind it."""

from router.openai.replies import ModelList
from router.tenants.directory import TenantDirectory
from router.tenants.document import parse
from router.tenants.keys import hash_key
from tests.router.served import serve

DOCUMENT = f"""
tenants:
  - id: acme
    keys: ["{hash_key("acme-key")}"]
    weight: 3
    models: [tiny-alias]
  - id: other
    keys: ["{hash_key("other-key")}"]
"""


def directory() -> TenantDirectory:
    made = TenantDirectory(described=True)
    made.replace(made.register_of(parse(DOCUMENT, "tenants.yaml"), str))
    return made


def _with(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_the_tenant_of_the_key_travels_with_the_job():
    async with serve(directory=directory()) as served:
        assert (await served.chat(_with("acme-key"), model="tiny-alias")).status_code == 200
        assert (await served.complete(_with("other-key"))).status_code == 200
        acme, other = [job.tenant for job in served.generator.requests]
        assert (acme.tenant_id, acme.weight) == ("acme", 3)
        assert other.tenant_id == "other"


async def test_tenants_never_share_a_cache_scope_with_the_same_salt():
    async with serve(directory=directory()) as served:
        await served.chat(_with("acme-key"), model="tiny-alias", cache_salt="s")
        await served.chat(_with("other-key"), cache_salt="s")
        acme, other = [job.prompt.cache_scope for job in served.generator.requests]
        assert acme != other


async def test_a_model_that_is_not_on_a_tenants_list_does_not_exist_for_it():
    async with serve(directory=directory()) as served:
        refused = await served.chat(_with("acme-key"))
        unknown = await served.chat(_with("acme-key"), model="nonsense")
        assert (refused.status_code, unknown.status_code) == (404, 404)
        assert refused.json()["error"]["code"] == unknown.json()["error"]["code"]
        listed = await served.http.get("/v1/models", headers=_with("acme-key"))
        assert [card.id for card in ModelList.model_validate_json(listed.content).data] == [
            "tiny-alias"
        ]
        assert (
            await served.http.get("/v1/models/tiny", headers=_with("acme-key"))
        ).status_code == 404
        assert served.generator.requests == []


async def test_a_key_may_come_in_the_header_that_anthropics_clients_send():
    async with serve(directory=directory()) as served:
        reply = await served.chat({"x-api-key": "other-key"})
        assert reply.status_code == 200
        assert served.generator.requests[0].tenant.tenant_id == "other"


async def test_without_a_credential_nobody_is_let_in():
    async with serve(directory=directory()) as served:
        for headers in ({}, {"Authorization": "Basic x"}, {"x-api-key": " "}):
            assert (await served.chat(headers)).status_code == 401
