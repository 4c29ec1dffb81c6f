"""The HTTP server: uvicorn, in a process that handles its own signals."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from fastapi import FastAPI

from router.http.head_limit import BoundedHeadProtocol


class HttpServer(uvicorn.Server):
    """Serves from its creation on; its owner waits for `serving` at the end."""

    def __init__(self, settings: uvicorn.Config, sockets: list[socket.socket]) -> None:
        super().__init__(settings)
        self.serving = asyncio.create_task(self.serve(sockets))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves them alone."""
        yield

    async def stopped_by(self, stop: asyncio.Event) -> None:
        """Waits for `stop`, then takes no new connections and closes the idle ones; raises what ended the server before that."""
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({stopping, self.serving}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        self.should_exit = True
        if self.serving.done():
            await self.serving


@asynccontextmanager
async def serving(
    app: FastAPI, sockets: list[socket.socket], *, keep_alive_s: float, drain_timeout_s: float
) -> AsyncIterator[HttpServer]:
    """Serves `app` inside; at the end lets begun replies finish.

    Args:
        app: What answers.
        sockets: Listening sockets; closed at the end.
        keep_alive_s: How long a connection may be open without a request.
        drain_timeout_s: How long begun replies may take to finish.
    """
    settings = uvicorn.Config(
        app,
        http=BoundedHeadProtocol,
        timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]  # said to be whole; it goes to `call_later`
        lifespan="off",
        access_log=False,
        log_config=None,
        # By then every request has ended; what is left are clients that do not read.
        timeout_graceful_shutdown=max(1, round(drain_timeout_s)),
    )
    server = HttpServer(settings, sockets)
    try:
        yield server
    finally:
        server.should_exit = True
        await server.serving
