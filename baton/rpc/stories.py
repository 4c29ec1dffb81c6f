"""A core's story as its message: what `Control.Story` answers."""

from collections.abc import Iterable

from baton.rpc.v1 import control_pb2 as pb
from baton.story import StoryEntry


def story_to_proto(process: str, story: Iterable[StoryEntry]) -> pb.StoryReply:
    """The story that `process` (`router`, or a worker's id) tells."""
    entries = [
        pb.StoryEntry(at_s=entry.at_s, event=entry.event, actions=entry.actions, process=process)
        for entry in story
    ]
    return pb.StoryReply(entries=entries)
