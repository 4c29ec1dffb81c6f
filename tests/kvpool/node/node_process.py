"""A pool node as a process of its own: `python -m tests.kvpool.node.node_process CONFIG`,
where CONFIG is a file of JSON.

With `stall_at` in it, the node stops in the middle of its first push, half of it written, after it has made that file.
"""

import asyncio
import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from baton.config.schema import BatonConfig, ClusterConfig, PoolConfig, TransferConfig
from baton.ids import Incarnation, WorkerId, WorkerIdentity
from kv_transfer.backends import shm
from kvpool.service import run
from tests.redis_servers import no_refusals
from tests.waits import WAIT_S


def stall(path: Path) -> None:
    real = shm.copy_pages

    def half(write: Any, source: Any, target: Any, plan: Any) -> None:
        numbers = range(len(write.target) // 2)
        for number in numbers:
            target[0][write.target[number]] = source[0][write.source[number]]
        path.touch()
        threading.Event().wait(10 * WAIT_S)
        real(write, source, target, plan)

    shm.copy_pages = half


async def main(said: dict[str, Any]) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    if said["stall_at"]:
        stall(Path(said["stall_at"]))
    folder, name = said["folder"], said["name"]
    await run(
        BatonConfig(
            pool=PoolConfig(**said["pool"]),
            transfer=TransferConfig(backends=tuple(said["backends"])),
            cluster=ClusterConfig(secret=said["secret"]),
        ),
        identity=WorkerIdentity(
            worker_id=WorkerId(name), incarnation=Incarnation(said["incarnation"])
        ),
        address=f"unix:{folder}/{name}.sock",
        peer_address=said["peer_address"],
        region_path=f"{folder}/{name}.kv",
        peer_region_path=f"{folder}/{name}-peers.kv",
        registry=CollectorRegistry(),
        refused=no_refusals(),
        ready=lambda: print("ready", flush=True),
        stop=stop,
    )


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
