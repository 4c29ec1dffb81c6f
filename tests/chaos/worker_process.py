"""A worker with a fake model in a process of its own: `python -m tests.chaos.worker_process ROLE NAME FOLDER [ADVERTISED]`.

Writes one line when it serves. Reads commands: `hold` (steps wait), `allow N`, `release`.
"""

import asyncio
import sys
import threading
from pathlib import Path

from baton.config.schema import TransferConfig
from baton.ids import Role
from tests.decode_worker.cluster import Node, start_node

TRANSFER = TransferConfig(quiesce_timeout_s=1.0)


async def main() -> None:
    role, name, folder, *advertised = sys.argv[1:]
    node = await start_node(
        Role(role),
        Path(folder),
        name=name,
        transfer=TRANSFER,
        advertised=advertised[0] if advertised else "",
    )
    threading.Thread(target=obey, args=(node,), daemon=True).start()
    print("serving", flush=True)
    await node.server.failed


def obey(node: Node) -> None:
    for line in sys.stdin:
        match line.split():
            case ["hold"]:
                node.runner.hold()
            case ["allow", steps]:
                node.runner.allow(int(steps))
            case ["release"]:
                node.runner.release()
        print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
