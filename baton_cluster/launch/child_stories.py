"""The story of a cluster's child at the launcher's own Unix socket: when it was started, what it said,
how it ended, what followed.

Beside the router's, because the router is a child too. A connection sends a name and a line's end,
gets a `StoryReply`, and is closed.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from google.protobuf.message import DecodeError

from baton.errors import ConfigError, UnavailableError
from baton.rpc.stories import story_to_proto
from baton.rpc.v1.common_pb2 import StoryReply
from baton.story import StoryEntry

SOCKET = "supervisor.sock"
_MAX_NAME = 256
_QUESTION_WAIT_S = 2.0
_ANSWER_WAIT_S = 5.0


async def serve_stories(
    folder: Path, tell: Callable[[str], Sequence[StoryEntry]]
) -> asyncio.Server:
    """Answers in `folder`, which only its owner can open, until the returned server is closed.

    Args:
        folder: The runtime directory.
        tell: What is remembered of the child of that name, on `time.monotonic`.

    Raises:
        ConfigError: There is no room for a socket in `folder`.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError, TimeoutError):  # an operator who went away
            async with asyncio.timeout(_QUESTION_WAIT_S):
                name = (await reader.readline()).decode().strip()
                told = story_to_proto("supervisor", tell(name), now_s=time.monotonic())
                writer.write(told.SerializeToString())
                await writer.drain()
        writer.close()

    try:
        return await asyncio.start_unix_server(answer, folder / SOCKET, limit=_MAX_NAME)
    except OSError as error:
        raise ConfigError(f"{folder}: {(error.strerror or str(error)).lower()}") from error


async def ask_story(folder: Path, name: str) -> StoryReply:
    """What the launcher of the cluster in `folder` remembers of one of its children;
    empty where it knows none of that name.

    Raises:
        UnavailableError: It does not answer.
    """
    try:
        async with asyncio.timeout(_ANSWER_WAIT_S):
            reader, writer = await asyncio.open_unix_connection(folder / SOCKET)
            with contextlib.closing(writer):
                writer.write(name.encode()[: _MAX_NAME - 1] + b"\n")
                return StoryReply.FromString(await reader.read())
    except (OSError, DecodeError, TimeoutError) as error:
        raise UnavailableError(f"the launcher of {folder} does not answer: {error}") from error
