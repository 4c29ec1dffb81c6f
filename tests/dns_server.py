"""A small authoritative DNS server for tests: A, AAAA and SRV records over UDP, which a test may change at any time.

`python -m tests.dns_server ADDRESS PORT FILE` serves the records of a JSON file, read anew for each question.
"""

import json
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from tests.waits import join

Records = Mapping[str, Mapping[str, list[str]]]
"""Texts of records by name and type: `{"decode.test.": {"A": ["127.0.0.1"]}}`."""


def answer(records: Records, question: bytes, rcode: dns.rcode.Rcode | None = None) -> bytes:
    """The reply to a question; with `rcode` a refusal."""
    query = dns.message.from_wire(question)
    reply = dns.message.make_response(query)
    reply.flags |= dns.flags.AA
    asked = query.question[0]
    name, kind = asked.name.to_text(), dns.rdatatype.to_text(asked.rdtype)
    if rcode is not None:
        reply.set_rcode(rcode)
    elif name not in records:
        reply.set_rcode(dns.rcode.NXDOMAIN)
    elif texts := records[name].get(kind):
        reply.answer.append(dns.rrset.from_text(asked.name, 300, "IN", kind, *texts))
    return reply.to_wire()


@dataclass(slots=True, eq=False)
class DnsServer:
    """One that runs in a thread.

    Attributes:
        records: What it serves; change it at any time.
        rcode: What it answers instead, to every question.
        silent: It reads questions and answers none.
        asked: How many questions came.
    """

    socket: socket.socket
    records: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    rcode: dns.rcode.Rcode | None = None
    silent: bool = False
    asked: int = 0

    @property
    def address(self) -> str:
        """`host:port`."""
        host, port = self.socket.getsockname()
        return f"{host}:{port}"

    def serve(self, stopped: Callable[[], bool]) -> None:
        """Answers until `stopped`."""
        while not stopped():
            if not select.select([self.socket], [], [], 0.02)[0]:
                continue
            question, client = self.socket.recvfrom(4096)
            self.asked += 1
            if not self.silent:
                self.socket.sendto(answer(self.records, question, self.rcode), client)


@contextmanager
def dns_server() -> Iterator[DnsServer]:
    """A server on a free port of the loopback interface."""
    stop = threading.Event()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
        bound.bind(("127.0.0.1", 0))
        server = DnsServer(bound)
        serving = threading.Thread(target=server.serve, args=(stop.is_set,), name="dns")
        serving.start()
        try:
            yield server
        finally:
            stop.set()
            join(serving)


def main(address: str, port: str, file: str) -> None:
    """Serves the records of `file` until it is killed."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
        bound.bind((address, int(port)))
        while True:
            question, client = bound.recvfrom(4096)
            bound.sendto(answer(json.loads(Path(file).read_text()), question), client)


if __name__ == "__main__":
    main(*sys.argv[1:])
