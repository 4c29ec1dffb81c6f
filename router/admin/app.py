"""What operators can see and do while a router serves. Never on the clients' port, never with a client's key.

Nothing here shows a key, a token or a prompt.
"""

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.errors import AuthenticationError, ConfigError, InvalidRequestError, RouteNotFoundError
from router import openapi
from router.admin.pool_client import PoolAdminClient
from router.admin.pool_routes import add_pool
from router.admin.replies import Reloaded, TenantReply, TenantUsage, tenant_reply, usage_reply
from router.admin.stories import OperatorStories
from router.admin.story_routes import add_block_story, add_story
from router.http import errors
from router.http.auth import credential_of
from router.tenancy import Tenancy
from router.tenants.keys import KeyRing, hash_key
from router.tenants.tenant import Tenant, TenantId

OPEN_PATHS = frozenset({"/health"})


class AdminAuthMiddleware:
    """Passes on requests that have one of the operators' keys. Decides by `scope["path"]`, which is what routing reads.

    Args:
        app: What stands behind it.
        keys: The operators'.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing[None]) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what may come in."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            credential = credential_of(Headers(scope=scope))
            if credential is None or credential not in self._keys:
                error = AuthenticationError("An operator's key is needed.")
                await errors.error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def create_admin_app(
    tenancy: Tenancy,
    api_keys: tuple[str, ...],
    pool: PoolAdminClient | None = None,
    stories: OperatorStories | None = None,
) -> FastAPI:
    """The application. It owns nothing.

    Args:
        tenancy: What it shows, and lets reload.
        api_keys: Operators must send one of them.
        pool: Asks the pool's nodes; there are none if None.
        stories: Tells what happened to requests; nothing is told if None.
    """
    app = FastAPI(title="Baton operations", docs_url=None, redoc_url=None, redirect_slashes=False)
    keys = KeyRing([(hash_key(key), None) for key in api_keys])
    app.add_middleware(AdminAuthMiddleware, keys=keys)
    errors.install(app)
    _add_tenants(app, tenancy)
    nodes = pool or PoolAdminClient(tuple)
    add_pool(app, nodes)
    add_block_story(app, nodes)
    if stories is not None:
        add_story(app, stories)

    @app.get("/health")
    async def get_health() -> dict[str, str]:
        return {"status": "ok"}

    return app


def _add_tenants(app: FastAPI, tenancy: Tenancy) -> None:
    @app.get("/admin/tenants", responses=openapi.ERRORS)
    async def get_tenants() -> list[TenantReply]:
        return [tenant_reply(tenant) for tenant in tenancy.directory.tenants]

    @app.get("/admin/tenants/{tenant_id}", responses=openapi.ERRORS)
    async def get_tenant(tenant_id: str) -> TenantUsage:
        tenant = _find(tenancy, tenant_id)
        usage = await tenancy.limiter.usage(tenant)
        circuit = tenancy.breakers.circuit(tenant.tenant_id, tenancy.clock.now_s())
        return usage_reply(tenant, usage, circuit)

    @app.post("/admin/reload", responses=openapi.ERRORS)
    async def post_reload() -> Reloaded:
        """Looks at the tenants document now. What is wrong with it is the answer, and changes nothing."""
        if tenancy.reloader is None:
            raise RouteNotFoundError("There is no tenants document to reload.")
        try:
            return Reloaded(changed=await tenancy.reloader.load())
        except ConfigError as error:
            raise InvalidRequestError(error.message, param=error.param) from error


def _find(tenancy: Tenancy, tenant_id: str) -> Tenant:
    for tenant in tenancy.directory.tenants:
        if tenant.tenant_id == TenantId(tenant_id):
            return tenant
    raise RouteNotFoundError(f"There is no tenant {tenant_id[:64]!r}.")
