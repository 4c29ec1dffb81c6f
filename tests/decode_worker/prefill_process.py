"""A prefill worker in a process of its own: `python -m tests.decode_worker.prefill_process FOLDER [STEPS]`.

Writes one line with its incarnation when it serves. With STEPS its engine stops after so many of them, in mid-prompt.
"""

import asyncio
import sys
from pathlib import Path

from baton.ids import Role
from tests.decode_worker.cluster import start_node


async def main() -> None:
    node = await start_node(Role.PREFILL, Path(sys.argv[1]))
    if len(sys.argv) > 2:
        node.runner.hold()
        for _ in range(int(sys.argv[2])):
            node.runner.allow()
    print(node.identity.incarnation, flush=True)
    await node.server.failed


if __name__ == "__main__":
    asyncio.run(main())
