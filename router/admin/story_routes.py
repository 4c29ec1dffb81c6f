"""Stories on the operators' surface: what the router's and the workers' cores did about a request, a worker, a tenant
or a block, and the pool's nodes about a block, event by event.
"""

from fastapi import FastAPI
from pydantic import BaseModel

from baton.errors import InvalidRequestError, RouteNotFoundError
from baton.hashing import parse_block_key
from baton.rpc.v1 import common_pb2
from router import openapi
from router.admin.pool_client import PoolAdminClient
from router.admin.stories import OperatorStories


class StoryEntryReply(BaseModel):
    """One event of a core of `process` (`router`, or a worker's id) and what it came to; `at_s` is on the router's
    monotonic clock, a pool node's on its own.
    """

    process: str
    core: str
    at_s: float
    event: str
    actions: list[str]


class StoryReply(BaseModel):
    """What happened to a request, oldest first, or to the worker, tenant or block of the workers' caches that was named
    instead. Nothing of a prompt or an answer.
    """

    request_id: str
    entries: list[StoryEntryReply]


class BlockStoryReply(BaseModel):
    """What happened to a block on one node of the pool, oldest first; `error` says why the node did not answer."""

    address: str
    error: str | None
    entries: list[StoryEntryReply]


def add_block_story(app: FastAPI, pool: PoolAdminClient) -> None:
    """Adds the route of a block's story to the operators' application."""

    @app.get("/debug/block/{key}", responses=openapi.ERRORS)
    async def get_block_story(key: str) -> list[BlockStoryReply]:
        try:
            asked = parse_block_key(key)
        except ValueError as error:
            raise InvalidRequestError(f"key: {error}", param="key") from error
        answers = await pool.story(asked)
        told = [
            BlockStoryReply(
                address=answer.address,
                error=answer.why or None,
                entries=[] if answer.reply is None else _entries(answer.reply),
            )
            for answer in answers
            if answer.reply is None or answer.reply.entries
        ]
        if not told:
            raise RouteNotFoundError(f"No node of the pool knows block {key}, or not any more.")
        return told


def add_story(app: FastAPI, stories: OperatorStories) -> None:
    """Adds the route of the story of a request, a worker,
    a tenant or a block of the workers' caches to the operators' application.
    """

    @app.get("/debug/story/{name}", responses=openapi.ERRORS)
    async def get_story(name: str) -> StoryReply:
        told = await stories.tell(name)
        if not told.entries:
            raise RouteNotFoundError(
                f"No router or worker here knows {name[:64]!r}, or not any more."
            )
        return StoryReply(request_id=name, entries=_entries(told))


def _entries(told: common_pb2.StoryReply) -> list[StoryEntryReply]:
    return [
        StoryEntryReply(
            process=entry.process,
            core=entry.core,
            at_s=entry.at_s,
            event=entry.event,
            actions=list(entry.actions),
        )
        for entry in told.entries
    ]
