"""The story of a request on the operators' surface: what the router's and the workers' cores did about it, event by event."""

from fastapi import FastAPI
from pydantic import BaseModel

from baton.errors import RouteNotFoundError
from baton.ids import RequestId
from router import openapi
from router.admin.stories import RequestStories


class StoryEntryReply(BaseModel):
    """One event of a core of `process` (`router`, or a worker's id) and what it came to; `at_s` is on the router's monotonic clock."""

    process: str
    core: str
    at_s: float
    event: str
    actions: list[str]


class StoryReply(BaseModel):
    """What happened to a request, oldest first. Nothing of its prompt or its answer."""

    request_id: str
    entries: list[StoryEntryReply]


def add_story(app: FastAPI, stories: RequestStories) -> None:
    """Adds the story's route to the operators' application."""

    @app.get("/debug/story/{request_id}", responses=openapi.ERRORS)
    async def get_story(request_id: str) -> StoryReply:
        told = await stories.tell(RequestId(request_id))
        if not told.entries:
            raise RouteNotFoundError(
                f"No router or worker here knows {request_id[:64]!r}, or not any more."
            )
        return StoryReply(
            request_id=request_id,
            entries=[
                StoryEntryReply(
                    process=entry.process,
                    core=entry.core,
                    at_s=entry.at_s,
                    event=entry.event,
                    actions=list(entry.actions),
                )
                for entry in told.entries
            ],
        )
