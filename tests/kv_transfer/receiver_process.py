"""Owns a receiving region in a process of its own, and does over its standard streams what the parent asks of it."""

import base64
import json
import sys
import threading

from kv_transfer.ports import RegionHandle
from kv_transfer.regions import SharedRegion
from kv_transfer.shm import ShmReceiver
from tests.kv_transfer.conformance import LAYOUT, RECEIVER_BLOCKS


def main() -> None:
    region = SharedRegion.create(LAYOUT.region_bytes(RECEIVER_BLOCKS))
    receiver = ShmReceiver(region, path=sys.argv[1], num_blocks=RECEIVER_BLOCKS)
    handles: dict[bytes, RegionHandle] = {}
    gone = threading.Event()
    for line in sys.stdin:
        asked = json.loads(line)
        answer = ""
        match asked["do"]:
            case "handle":
                handle = receiver.handle()
                handles[handle.opaque] = handle
                answer = base64.b64encode(handle.opaque).decode()
            case "revoke":
                receiver.revoke(handles[base64.b64decode(asked["with"])], gone.set)
            case "gone":
                gone.wait(30)
            case "read":
                answer = base64.b64encode(region.memoryview).decode()
            case "write":
                region.memoryview[:] = base64.b64decode(asked["with"])
            case "close":
                receiver.close()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
