"""The operators' surface: its own keys, no secrets shown, and a reload that says what is wrong."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from baton.clock import ManualClock
from baton.errors import WorkerLostError
from baton.story import StoryLog
from baton.telemetry.metrics import new_registry
from router.admin.app import create_admin_app
from router.admin.stories import OperatorStories
from router.limits.local import LocalLimiter
from router.limits.ports import GrantId
from router.routing.index import PrefixIndex
from router.routing.view import ClusterView
from router.tenancy import Tenancy, tenancy_of_keys
from router.tenants.directory import TenantDirectory
from router.tenants.keys import hash_key
from router.tenants.reload import ReloadMetrics, TenantReloader
from router.tenants.sources import FileSource
from router.tenants.tenant import TenantId

OPERATOR = {"Authorization": "Bearer operator"}
DOCUMENT = f"""
tenants:
  - {{id: acme, keys: ["{hash_key("client")}"], requests_per_minute: 60, models: [b, a], admin: true}}
"""


@contextlib.asynccontextmanager
async def client_of(
    tenancy: Tenancy, stories: OperatorStories | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_admin_app(tenancy, ("operator",), stories=stories)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        yield client


async def described(path: Path) -> Tenancy:
    """What a router with the document at `path` has."""
    path.write_text(DOCUMENT)  # noqa: ASYNC240  # a test's few bytes
    clock, directory = ManualClock(), TenantDirectory(described=True)
    reloader = TenantReloader(
        FileSource(path),
        directory,
        ReloadMetrics(new_registry()),
        pause_s=1.0,
        slo_classes=("standard",),
    )
    await reloader.load()
    return Tenancy(directory=directory, limiter=LocalLimiter(clock), clock=clock, reloader=reloader)


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer client"}, {"Authorization": "Bearer operato"}]
)
async def test_only_operators_are_let_in_whatever_the_host_or_path_look_like(headers, tmp_path):
    async with client_of(await described(tmp_path / "t.yaml")) as client:
        for path in ("/admin/tenants", "/admin/tenants/acme", "//health", "/health/../admin"):
            reply = await client.get(path, headers={**headers, "Host": "x/health?"})
            assert reply.status_code == 401, path
            assert reply.json()["error"]["code"] == "invalid_api_key"
        assert (await client.post("/admin/reload", headers=headers)).status_code == 401
        assert (await client.get("/health", headers=headers)).status_code == 200


async def test_tenants_are_listed_without_their_keys(tmp_path):
    async with client_of(await described(tmp_path / "t.yaml")) as client:
        reply = await client.get("/admin/tenants", headers=OPERATOR)
        (acme,) = reply.json()
        assert (acme["id"], acme["models"], acme["admin"]) == ("acme", ["a", "b"], True)
        assert acme["limits"]["requests_per_minute"] == 60
        assert hash_key("client").removeprefix("sha256:")[:8] not in reply.text


async def test_a_tenants_use_is_shown(tmp_path):
    tenancy = await described(tmp_path / "t.yaml")
    (acme,) = tenancy.directory.tenants
    await tenancy.limiter.enter(acme, GrantId("1"))
    async with client_of(tenancy) as client:
        use = (await client.get("/admin/tenants/acme", headers=OPERATOR)).json()
        assert use["in_flight"] == 1
        assert use["requests"] == {"limit": 60, "remaining": 59, "reset_s": 1}
        assert use["tokens"] is None
        assert use["circuit"] == "closed"
        assert (await client.get("/admin/tenants/nobody", headers=OPERATOR)).status_code == 404


async def test_a_reload_is_done_at_once_or_says_what_is_wrong(tmp_path):
    tenancy = await described(tmp_path / "t.yaml")
    async with client_of(tenancy) as client:
        (tmp_path / "t.yaml").write_text(DOCUMENT.replace("acme", "other"))
        reply = await client.post("/admin/reload", headers=OPERATOR)
        assert reply.json() == {"changed": True}
        (tmp_path / "t.yaml").write_text("tenants: [{id: x, weight: -5}]")
        reply = await client.post("/admin/reload", headers=OPERATOR)
        assert reply.status_code == 400
        assert "tenants[0].weight" in reply.json()["error"]["message"]
        again = await client.post("/admin/reload", headers=OPERATOR)
        assert (again.status_code, again.json()) == (400, reply.json())
        assert [tenant.tenant_id for tenant in tenancy.directory.tenants] == ["other"]


async def test_without_a_document_there_is_one_tenant_and_nothing_to_reload():
    tenancy = tenancy_of_keys(("k",), ManualClock())
    async with client_of(tenancy) as client:
        (anonymous,) = (await client.get("/admin/tenants", headers=OPERATOR)).json()
        assert anonymous["id"] == "anonymous"
        assert (await client.post("/admin/reload", headers=OPERATOR)).status_code == 404


async def test_the_story_of_a_request_is_told_to_operators_alone(tmp_path):
    log = StoryLog("dispatch")
    log.record("cmpl-1", 2.5, "placed", ("SendLeg(leg_id=1)",))
    stories = OperatorStories(log.story, ClusterView(PrefixIndex()), ManualClock())
    async with client_of(await described(tmp_path / "t.yaml"), stories) as client:
        assert (await client.get("/debug/story/cmpl-1")).status_code == 401
        told = (await client.get("/debug/story/cmpl-1", headers=OPERATOR)).json()
        assert told["request_id"] == "cmpl-1"
        assert told["entries"] == [
            {
                "process": "router",
                "core": "dispatch",
                "at_s": 2.5,
                "event": "placed",
                "actions": ["SendLeg(leg_id=1)"],
            }
        ]
        unknown = await client.get("/debug/story/cmpl-2", headers=OPERATOR)
        assert unknown.status_code == 404
        assert "knows 'cmpl-2'" in unknown.json()["error"]["message"]


async def test_what_was_decided_about_a_tenant_is_told_to_operators(tmp_path):
    tenancy = await described(tmp_path / "t.yaml")
    (acme,) = tenancy.directory.tenants
    for number in range(61):
        await tenancy.limiter.enter(acme, GrantId(f"r{number}"))
    tenancy.breakers.finished(TenantId("other"), None, 0.0)
    for _ in range(9):
        tenancy.breakers.finished(TenantId("other"), None, 0.0)
        tenancy.breakers.finished(acme.tenant_id, WorkerLostError("lost"), 1.0)
    view = ClusterView(PrefixIndex())
    stories = OperatorStories(lambda _: (), view, ManualClock(), of_tenant=tenancy.story)
    async with client_of(tenancy, stories) as client:
        reply = await client.get(f"/debug/story/{acme.tenant_id}", headers=OPERATOR)
    told = [(entry["core"], entry["event"], entry["actions"]) for entry in reply.json()["entries"]]
    assert [event for core, event, _ in told if core == "limits"] == ["refused: requests, for 1 s"]
    assert ("circuit", "failed", ["opened for 5 s"]) in told
