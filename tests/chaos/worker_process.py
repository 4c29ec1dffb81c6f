"""A worker with a fake model in a process of its own:
`python -m tests.chaos.worker_process ENGINE ROLE NAME FOLDER [ADVERTISED]`.

ENGINE is `baton`, or `vllm` for the host of vLLM's core over one that goes by vLLM's rules.

Writes one line when it serves. Reads commands: `hold` (steps wait), `allow N`, `release`.
"""

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

from baton.config.schema import TransferConfig
from baton.ids import Role
from baton_vllm.hand_offs import VllmHandOffs
from baton_vllm.host import VllmEngineHost
from baton_worker.server import WorkerServer
from kv_transfer.memory.arena import WorkerMemory
from prefill_worker.sink import TransferSink
from tests.baton_vllm.fake_core import PagedCore
from tests.decode_worker.cluster import (
    LAYOUT,
    LIMITS,
    REGION_BLOCKS,
    ArenaPages,
    GatedRunner,
    start_node,
    start_server,
)

TRANSFER = TransferConfig(quiesce_timeout_s=1.0)


async def main() -> None:
    engine, role, name, folder, *advertised = sys.argv[1:]
    options: dict[str, Any] = {
        "name": name,
        "transfer": TRANSFER,
        "advertised": advertised[0] if advertised else "",
    }
    start = with_vllm if engine == "vllm" else with_ours
    gate, server = await start(Role(role), Path(folder), options)
    threading.Thread(target=obey, args=(gate,), daemon=True).start()
    print("serving", flush=True)
    await server.failed


async def with_ours(
    role: Role, folder: Path, options: dict[str, Any]
) -> tuple[GatedRunner, WorkerServer]:
    node = await start_node(role, folder, **options)
    return node.runner, node.server


async def with_vllm(
    role: Role, folder: Path, options: dict[str, Any]
) -> tuple[PagedCore, WorkerServer]:
    arena, sink = WorkerMemory(), TransferSink()
    pages = ArenaPages(arena.allocate(LAYOUT.region_bytes(REGION_BLOCKS)).host_view)
    hand_offs = VllmHandOffs(sink)
    core = PagedCore(hand_offs, LIMITS, pages)
    host = VllmEngineHost(core, hand_offs, LIMITS)
    _, server, _ = await start_server(role, folder, host, arena, sink, **options)
    host.start()
    return core, server


def obey(gate: GatedRunner | PagedCore) -> None:
    for line in sys.stdin:
        match line.split():
            case ["hold"]:
                gate.hold()
            case ["allow", steps]:
                gate.allow(int(steps))
            case ["release"]:
                gate.release()
        print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
