"""A router in a process of its own: `python -m tests.router.lone_router ADDRESS...` begins a job and never reads on."""

import asyncio
import sys

from baton.backoff import Backoff
from baton.config.schema import RouterConfig
from baton.ids import Role
from router.service import compose, running
from router.workers.links import LinkTiming
from tests.router.test_generator import job


async def main(addresses: list[str]) -> None:
    parts = compose(
        RouterConfig(),
        addresses,
        b"s" * 32,
        link_timing=LinkTiming(backoff=Backoff(first_s=0.01, max_s=0.5)),
    )
    async with running(parts):
        while not any(worker.hello.role is Role.HYBRID for worker in parts.view.workers):
            await parts.discovery.next_worker()
        stream = parts.generator.generate(job("theirs", max_tokens=100))
        await anext(stream)
        print("begun", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
