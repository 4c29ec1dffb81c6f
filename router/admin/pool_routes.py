"""The pool on the operators' surface: what its nodes hold for which tenants, and a flush while serving."""

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict

from baton.errors import InvalidRequestError, RouteNotFoundError, UnavailableError
from baton.rpc.v1 import pool_pb2 as pb
from router import openapi
from router.admin.pool_client import PoolAdminClient, PoolNodeAnswer


class PoolTenantReply(BaseModel):
    """One tenant's part of a node; a null quota is no limit."""

    tenant: str
    dram_bytes: int
    ssd_bytes: int
    blocks: int
    quota_bytes: int | None
    weight: float
    hit_blocks: int
    missed_blocks: int


class PoolNodeReply(BaseModel):
    """One node; all but its address is null where it did not answer, for the reason in `error`."""

    address: str
    error: str | None = None
    node: str | None = None
    dram_bytes: int | None = None
    dram_capacity_bytes: int | None = None
    ssd_bytes: int | None = None
    hit_blocks: int | None = None
    missed_blocks: int | None = None
    sick: bool | None = None
    directory_reachable: bool | None = None
    tenants: list[PoolTenantReply] | None = None


class FlushOrder(BaseModel):
    """What to forget: what fits all that is named; everything only if `all` says so."""

    model_config = ConfigDict(extra="forbid")

    tenant: str = ""
    cache_scope: str = ""
    model_fingerprint: str = ""
    all: bool = False


class FlushedNode(BaseModel):
    """One node: blocks that it gave up; null where it did not answer, for the reason in `error`."""

    address: str
    blocks: int | None
    error: str | None = None


class Flushed(BaseModel):
    """What came of a flush."""

    blocks: int
    nodes: list[FlushedNode]


def add_pool(app: FastAPI, client: PoolAdminClient) -> None:
    """Adds the pool's routes to the operators' application."""

    @app.get("/admin/pool", responses=openapi.ERRORS)
    async def get_pool() -> list[PoolNodeReply]:
        return [_node(answer) for answer in await _known(client).usage()]

    @app.post("/admin/pool/flush", responses=openapi.ERRORS)
    async def post_flush(order: FlushOrder) -> Flushed:
        """Blocks that are covered are neither lent nor put from now on; a read that has begun may finish."""
        selection = (order.tenant, order.cache_scope, order.model_fingerprint)
        if order.all == any(selection):
            raise InvalidRequestError(
                "Say what to flush: tenant, cache_scope or model_fingerprint, or else all.",
                param="all",
            )
        tenant, scope, model = selection
        asked = pb.FlushPoolRequest(tenant=tenant, cache_scope=scope, model_fingerprint=model)
        return _flushed(await _known(client).flush(asked))


def _known(client: PoolAdminClient) -> PoolAdminClient:
    if not client.addresses():
        raise RouteNotFoundError("This cluster has no pool.")
    return client


def _flushed(answers: list[PoolNodeAnswer[pb.FlushPoolReply]]) -> Flushed:
    if all(answer.reply is None for answer in answers):
        raise UnavailableError(f"No node of the pool answers: {answers[0].why}")
    nodes = [
        FlushedNode(
            address=answer.address,
            blocks=None if answer.reply is None else answer.reply.blocks,
            error=answer.why or None,
        )
        for answer in answers
    ]
    return Flushed(blocks=sum(node.blocks or 0 for node in nodes), nodes=nodes)


def _node(answer: PoolNodeAnswer[pb.PoolUsageReply]) -> PoolNodeReply:
    reply = answer.reply
    if reply is None:
        return PoolNodeReply(address=answer.address, error=answer.why)
    return PoolNodeReply(
        address=answer.address,
        node=reply.node.worker_id,
        dram_bytes=(reply.slots_total - reply.slots_free) * reply.slot_bytes,
        dram_capacity_bytes=reply.slots_total * reply.slot_bytes,
        ssd_bytes=reply.ssd_blocks * reply.slot_bytes,
        hit_blocks=reply.hit_blocks,
        missed_blocks=reply.missed_blocks,
        sick=reply.sick,
        directory_reachable=reply.directory_reachable,
        tenants=[_tenant(owner) for owner in reply.owners],
    )


def _tenant(owner: pb.OwnerUsage) -> PoolTenantReply:
    return PoolTenantReply(
        tenant=owner.tenant,
        dram_bytes=owner.dram_bytes,
        ssd_bytes=owner.ssd_bytes,
        blocks=owner.blocks,
        quota_bytes=owner.quota_bytes if owner.HasField("quota_bytes") else None,
        weight=owner.weight,
        hit_blocks=owner.hit_blocks,
        missed_blocks=owner.missed_blocks,
    )
