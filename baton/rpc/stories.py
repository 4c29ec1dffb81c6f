"""A core's story as its message: what `Control.Story` and `Pool.Story` answer."""

from collections.abc import Iterable

from baton.rpc.v1 import common_pb2 as pb
from baton.story import StoryEntry


def story_to_proto(process: str, story: Iterable[StoryEntry], *, now_s: float) -> pb.StoryReply:
    """The story that `process` (`router`, or a worker's or node's id) tells at `now_s` of its own clock."""
    entries = [
        pb.StoryEntry(
            at_s=entry.at_s,
            event=entry.event,
            actions=entry.actions,
            process=process,
            core=entry.core,
        )
        for entry in story
    ]
    return pb.StoryReply(entries=entries, now_s=now_s)
