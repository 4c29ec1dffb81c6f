"""A child of the launcher that speaks the real protocol and serves nothing; what it does stands in its model's name.

The launcher starts it as `python -m tests.baton_cluster.fake_role ROLE --name NAME --lifeline FD`. `model.model` is a
list of `NAME:BEHAVIOUR`, separated by spaces.
"""

import argparse
import asyncio
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from baton.errors import ModelLoadError
from baton_cluster.launch.child import Child, run, run_standby
from baton_cluster.launch.standby import STANDBY
from tests.waits import WAIT_S


async def fake(child: Child) -> None:
    part = child.assignment.part
    behaviours = dict(
        item.split(":", 1) for item in child.assignment.config.model.model.split() if ":" in item
    )
    behaviour = behaviours.get(part.name, "")
    child.progress("loading weights", 0.5)
    if behaviour == "fatal":
        raise ModelLoadError("no config.json in /nowhere", param="model")
    if behaviour == "bug":
        raise ZeroDivisionError("oops")
    if behaviour == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "lives-twice" and not _was_here(part.name, child):
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "loads-for-ever":
        await asyncio.to_thread(threading.Event().wait, 10 * WAIT_S)
    if behaviour == "ignores-sigterm":
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if part.http_fds:
        await _serve_http(child)
    else:
        address = part.worker.address if part.worker else part.pool_address
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(address.removeprefix("unix:"))
            await _serve(child)


async def _serve(child: Child) -> None:
    child.ready()
    if "hangs" in child.assignment.config.model.model:
        # The loop is blocked: neither a signal nor the lifeline reaches it.
        threading.Event().wait(10 * WAIT_S)
    await child.stop.wait()
    _record_end(child)


async def _serve_http(child: Child) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"{child.assignment.part.incarnation}\n".encode())
        writer.close()

    sock = socket.socket(fileno=child.assignment.part.http_fds[0])
    server = await asyncio.start_server(answer, sock=sock)
    if "router:waits-for-workers" in child.assignment.config.model.model:
        child.serving()
        child.progress("waiting for workers")
        await child.stop.wait()
        await asyncio.to_thread(_record_end, child)  # as long as something is in flight
        return
    await _serve(child)
    server.close()


def import_nothing() -> None:
    """A standby process of this module is ready at once."""


def _was_here(name: str, child: Child) -> bool:
    """Whether this is not the first start of `name`."""
    mark = Path(child.assignment.config.cluster.runtime_dir).with_suffix(f".{name}")
    if mark.exists():
        return True
    mark.touch()
    return False


def _record_end(child: Child) -> None:
    """Appends this child's name to a file beside the runtime directory: the order in which children ended."""
    record = Path(child.assignment.config.cluster.runtime_dir).with_suffix(".ends")
    with record.open("a") as file:
        file.write(child.assignment.part.name + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("role")
    parser.add_argument("--name")
    parser.add_argument("--lifeline", type=int)
    arguments = parser.parse_args(sys.argv[1:])
    if arguments.role == STANDBY:
        run_standby(lambda _: fake, import_nothing, arguments.lifeline)
    run(fake, arguments.lifeline)
