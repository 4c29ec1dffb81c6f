"""Owns a receiving region in a process of its own, and does over its standard streams what the parent asks of it."""

import base64
import json
import os
import sys
import threading

from kv_transfer.backends.registry import open_receivers
from kv_transfer.memory.listening import Listening
from kv_transfer.memory.region_server import RegionAccess
from kv_transfer.memory.shared_region import SharedRegion
from kv_transfer.ports import RegionHandle
from tests.kv_transfer.conformance import LAYOUT, RECEIVER_BLOCKS, SECRET
from tests.kv_transfer.device_memory import DeviceMemory


def main() -> None:
    # Transports' own libraries print to standard output at times: the answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    backend, address, *device = sys.argv[1:]
    size = LAYOUT.region_bytes(RECEIVER_BLOCKS)
    gpu = DeviceMemory(int(device[0]), size) if device else None
    region = SharedRegion.create(size) if gpu is None else gpu.span
    memory = region.memoryview if isinstance(region, SharedRegion) else gpu
    assert memory is not None
    receiver = open_receivers(
        [backend],
        region,
        server_address=lambda _name: address,
        layout=LAYOUT,
        num_blocks=RECEIVER_BLOCKS,
        admission=RegionAccess(secret=SECRET, listening=Listening.at(address, "", "")),
    )[backend]
    handles: dict[bytes, RegionHandle] = {}
    gone: dict[bytes, threading.Event] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        answer = ""
        match asked["do"]:
            case "handle":
                handle = receiver.handle()
                handles[handle.opaque] = handle
                answer = base64.b64encode(handle.opaque).decode()
            case "revoke":
                opaque = base64.b64decode(asked["with"])
                gone[opaque] = threading.Event()
                receiver.revoke(handles[opaque], gone[opaque].set)
            case "gone":
                gone[base64.b64decode(asked["with"])].wait(30)
            case "read":
                answer = base64.b64encode(bytes(memory)).decode()
            case "write":
                memory[:] = base64.b64decode(asked["with"])
            case "close":
                receiver.close()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
