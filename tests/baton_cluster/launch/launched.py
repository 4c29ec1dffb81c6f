"""Runs a cluster of fake children as a process of its own, so that a test can kill its launcher.
Prints one JSON line.
"""

import asyncio
import json
import signal
import sys

from baton.config.load import from_json
from baton.errors import BatonError
from baton_cluster.launch.launcher import LocalCluster
from tests.waits import WAIT_S


async def main() -> int:
    config = from_json(sys.stdin.buffer.readline())
    cluster = LocalCluster(config, child_module="tests.baton_cluster.fake_role")
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, cluster.request_stop)
    try:
        async with cluster:
            async with asyncio.timeout(WAIT_S):
                while (standby := cluster.standby_pid) is None:  # noqa: ASYNC110  # it comes by itself
                    await asyncio.sleep(0.01)
            facts = {
                "url": cluster.url,
                "runtime_dir": str(cluster.runtime_dir),
                "pids": {child.name: child.pid for child in cluster.children}
                | {"standby": standby},
            }
            print(json.dumps(facts), flush=True)
            await cluster.wait()
    except BatonError as error:
        print(json.dumps({"error": error.message}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
