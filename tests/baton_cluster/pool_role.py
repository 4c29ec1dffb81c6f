"""The real roles, but for the pool's service, in whose place stands one that only shows what it was given.

Run as `python -m tests.baton_cluster.pool_role ROLE --name NAME --lifeline FD`.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from prometheus_client import CollectorRegistry

from baton.config.schema import BatonConfig
from baton.ids import WorkerIdentity
from baton.redis_link import RefusedValues
from baton_cluster.roles import main
from kvpool.ports import AllowanceSource


async def serve(
    config: BatonConfig,
    *,
    identity: WorkerIdentity,
    address: str,
    peer_address: str,
    region_path: str,
    peer_region_path: str,
    allowances: AllowanceSource | None,  # the real one
    registry: CollectorRegistry,
    refused: RefusedValues,
    ready: Callable[[], None],
    stop: asyncio.Event,
) -> None:
    del peer_address, peer_region_path, registry, refused
    record = Path(config.cluster.runtime_dir).with_suffix(".pool")
    facts = {
        "identity": str(identity),
        "address": address,
        "region_path": region_path,
        "memory_bytes": config.pool.memory_bytes,
        "torch": "torch" in sys.modules,
        "drained": False,
    }
    record.write_text(json.dumps(facts))
    ready()
    await stop.wait()
    record.write_text(json.dumps(facts | {"drained": True}))


if __name__ == "__main__":
    stub = ModuleType("kvpool.service")
    stub.run = serve  # type: ignore[attr-defined]
    sys.modules["kvpool.service"] = stub
    main()
