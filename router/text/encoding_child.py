"""The process in which long texts are encoded, started by `router.text.long_texts`.

It runs by its path in an isolated interpreter and talks over the stream socket that is its standard input; each message
is its length (8 bytes, little-endian) and its bytes:

    parent → child   a bound on memory (8 bytes) and the tokenizer, as its library writes it     once
    child → parent   nothing, when it is ready
    parent → child   a byte that is 1 where special tokens are added, and the text in UTF-8      per text
    child → parent   the token ids, four bytes each, little-endian

It gives way to the process that started it. The bound is on the address space that it takes besides the tokenizer:
where that is used up it ends without an answer.
"""

import os
import resource
import signal
import socket
from array import array

from tokenizers import Tokenizer

_GIVES_WAY = 10


def main() -> None:
    """Encodes until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_GIVES_WAY)
    # One text is encoded at a time, and its library would start a thread for each processor: of hundreds the stacks alone
    # take what a text may.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    connection = socket.socket(fileno=0)
    first = _receive(connection)
    if first is None:
        return
    backend = Tokenizer.from_str(first[8:].decode())
    _bound_memory(int.from_bytes(first[:8], "little"))
    del first
    _send(connection, b"")
    while (request := _receive(connection)) is not None:
        _send(connection, _encoded(backend, request))


def _encoded(backend: Tokenizer, request: bytes) -> bytes:
    text = str(memoryview(request)[1:], "utf-8")
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=request[:1] == b"\1")
    return array("I", encoding.ids).tobytes()


def _receive(connection: socket.socket) -> bytes | None:
    head = connection.recv(8, socket.MSG_WAITALL)
    size = int.from_bytes(head, "little")
    body = connection.recv(size, socket.MSG_WAITALL) if size else b""
    return body if len(head) == 8 and len(body) == size else None


def _send(connection: socket.socket, body: bytes) -> None:
    connection.sendall(len(body).to_bytes(8, "little"))
    connection.sendall(body)


def _bound_memory(most: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + most, used + most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
