"""The process in which llguidance is asked whether it takes a grammar, started by `router.generation.grammar_faults`.

It runs by its path in an isolated interpreter and talks over the stream socket that is its standard input; each message
is its length (8 bytes, little-endian) and its bytes, which are JSON:

    parent → child   {"limits", "stack_bytes", "memory_bytes", "limit_s"}                    once
    child → parent   nothing, when it is ready
    parent → child   {"grammars", "limited": whether the limits hold for them}               per question
    child → parent   {"place" of the first that has a fault, "fault", "cpu_s" that it took}  empty fault for none

As the templates' (`router.templates.sandbox`) it imports nothing of Baton's: what it shares with that stands here
again.

llguidance is native code: a grammar that takes more stack than a thread has ends the process. So the thread has a
stack of a known size, and who asked is told.
"""

import json
import math
import resource
import signal
import socket
import threading
import time
from typing import Any

from llguidance import LLMatcher, LLParserLimits

_MOST_CHARACTERS = 4096
"""Of a fault."""


def main() -> None:
    """Answers until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=0)
    first = _receive(connection)
    if first is None:
        return
    settings = json.loads(first)
    threading.stack_size(settings["stack_bytes"])
    _bound(settings["memory_bytes"])
    answering = threading.Thread(target=_answer_all, args=(connection, settings))
    answering.start()
    answering.join()


def _answer_all(connection: socket.socket, settings: dict[str, Any]) -> None:
    limits = LLParserLimits(**settings["limits"])
    _send(connection, b"")
    while (question := _receive(connection)) is not None:
        _allow_cpu(settings["limit_s"])
        asked = json.loads(question)
        begun_s = time.thread_time()
        place, fault = _first_fault(asked["grammars"], limits if asked["limited"] else None)
        cpu_s = time.thread_time() - begun_s
        answer = {"place": place, "fault": fault[:_MOST_CHARACTERS], "cpu_s": cpu_s}
        _send(connection, json.dumps(answer).encode())


def _first_fault(grammars: list[str], limits: LLParserLimits | None) -> tuple[int, str]:
    for place, grammar in enumerate(grammars):
        fault = LLMatcher.validate_grammar(grammar, limits=limits)
        if fault and not fault.startswith("WARNING"):
            return place, fault
    return 0, ""


def _receive(connection: socket.socket) -> bytes | None:
    head = connection.recv(8, socket.MSG_WAITALL)
    size = int.from_bytes(head, "little")
    body = connection.recv(size, socket.MSG_WAITALL) if size else b""
    return body if len(head) == 8 and len(body) == size else None


def _send(connection: socket.socket, body: bytes) -> None:
    connection.sendall(len(body).to_bytes(8, "little") + body)


def _bound(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _allow_cpu(limit_s: float) -> None:
    """So much processor time from now on, in case the parent is not there any more to end a check."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + limit_s) + 1, hard))


if __name__ == "__main__":
    main()
