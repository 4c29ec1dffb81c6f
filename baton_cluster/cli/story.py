"""A story as commands show it: a line per event of any process, in order of time, with what followed of it below."""

import time
from datetime import UTC, datetime
from itertools import groupby

from google.protobuf.json_format import MessageToJson

from baton.rpc.v1.common_pb2 import StoryReply


def story_text(reply: StoryReply, about: str, *, as_json: bool) -> str:
    """What is written to the terminal, or to a machine, of a story that was told a moment ago. It has an entry."""
    if as_json:
        return MessageToJson(reply, preserving_proto_field_name=True) + "\n"
    ago_s = reply.now_s - reply.entries[0].at_s
    began = datetime.fromtimestamp(time.time() - ago_s, UTC)
    processes = ", ".join(dict.fromkeys(entry.process for entry in reply.entries))
    head = f"{about}: from {began:%H:%M:%S.%f} UTC on, in {processes}"
    return "\n".join([head, *story_lines(reply)]) + "\n"


def story_lines(reply: StoryReply) -> list[str]:
    """A line per event, at milliseconds after the first, with process and core; one more per action,
    or per several that are alike.
    """
    began_s = reply.entries[0].at_s
    process = max(len(entry.process) for entry in reply.entries)
    core = max(len(entry.core) for entry in reply.entries)
    lines: list[str] = []
    for entry in reply.entries:
        after_ms = 1000.0 * (entry.at_s - began_s)
        lines.append(
            f"{after_ms:10.1f} ms  {entry.process:{process}}  {entry.core:{core}}  {entry.event}"
        )
        for action, alike in groupby(entry.actions):
            times = len(list(alike))
            often = f", {times} times" if times > 1 else ""
            lines.append(f"{'':{process + core + 19}}-> {action}{often}")
    return lines
