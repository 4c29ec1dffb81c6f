"""The audit log: one line of JSON per request, from which an operator sees later what each tenant used.

A request only leaves its record in a queue; a thread writes. So the disk never holds up the event loop, and nothing
that goes wrong there fails a request: what cannot be written is dropped and counted. The file is opened anew when it
was moved away, so that logrotate needs no signal.
"""

import os
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, Full, Queue

import msgspec
from prometheus_client import CollectorRegistry, Counter

from baton.telemetry.logs import get_logger
from router.http.account import RequestAccount

MAX_QUEUED = 10_000
MAX_QUEUED_CHARS = 64 * 1024 * 1024
"""Of what was asked and answered; a record that is alone may have more."""
_BATCH = 500
_CLOSE_TIMEOUT_S = 5.0
_PRIVATE_FILE = 0o600

_log = get_logger(__name__)


class AuditContent(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked (the body as it came) and answered (the text of each choice)."""

    asked: str
    answered: tuple[str, ...]

    @property
    def num_chars(self) -> int:
        """What it takes in memory, about."""
        return len(self.asked) + sum(map(len, self.answered))


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. Never a key or a token: `key` only names it.

    Attributes:
        time: When it was answered, UTC.
        request_id: As in the reply's `X-Request-Id`.
        where: Method and declared path.
        status: Of the reply.
        tenant: Empty if the credential was not recognised.
        key: Names the key or token that was used.
        model: The name that was asked for.
        job: The reply's own id, which is also in logs and traces.
        error: Code of the error that ended it.
        prompt_tokens: Of all prompts.
        cached_tokens: Those whose KV a prefix cache held.
        output_tokens: Generated.
        duration_s: From the first byte of the request to the last of the reply.
        first_token_s: Until the first token.
        content: Only where the operator asks for it.
    """

    time: str
    request_id: str
    where: str
    status: int
    tenant: str = ""
    key: str = ""
    model: str = ""
    job: str = ""
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    duration_s: float = 0.0
    first_token_s: float | None = None
    content: AuditContent | None = None


class AuditLog:
    """Appends to one file from a thread of its own.

    Args:
        path: The file; made readable for its owner only.
        registry: Where its metrics go.
        max_queued: Records that may wait; beyond that they are dropped.
        max_queued_chars: The same of what was asked and answered in them.
        close_timeout_s: How long `close` waits for a file that does not take what it is given.
    """

    def __init__(
        self,
        path: Path,
        registry: CollectorRegistry,
        *,
        max_queued: int = MAX_QUEUED,
        max_queued_chars: int = MAX_QUEUED_CHARS,
        close_timeout_s: float = _CLOSE_TIMEOUT_S,
    ) -> None:
        self._path = path
        self._close_timeout_s = close_timeout_s
        self._max_queued_chars = max_queued_chars
        self._queue: Queue[AuditRecord | None] = Queue(max_queued)
        # Characters that were ever queued, and of those the ones that are written or dropped: one thread changes each count.
        self._queued_chars = self._done_chars = 0
        self._written = Counter("baton_audit_records", "Audit records written.", registry=registry)
        self._dropped = Counter(
            "baton_audit_dropped", "Audit records that could not be written.", registry=registry
        )
        self._fd: int | None = None
        self._torn = False
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    def write(self, record: AuditRecord) -> None:
        """Leaves a record to be written. Neither blocks nor fails."""
        num_chars, waiting = _num_chars(record), self._queued_chars - self._done_chars
        if num_chars and waiting and waiting + num_chars > self._max_queued_chars:
            self._dropped.inc()
            return
        try:
            self._queue.put_nowait(record)
        except Full:
            self._dropped.inc()
        else:
            self._queued_chars += num_chars

    def close(self) -> None:
        """Writes what waits, and ends. Blocks, and no longer than `close_timeout_s`: a disk that is gone, or a pipe that nobody
        reads, keeps no router from leaving.
        """
        deadline_s = time.monotonic() + self._close_timeout_s
        with suppress(Full):
            self._queue.put(None, timeout=self._close_timeout_s)
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            why = f"the file took nothing for {self._close_timeout_s:g} s"
            waiting = self._queue.qsize()
            _log.error("audit records are lost", why=why, path=str(self._path), at_least=waiting)
        elif self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _run(self) -> None:
        encoder = msgspec.json.Encoder()
        going_on = True
        while going_on:
            records, going_on = self._take()
            lines = b"".join([encoder.encode(record) + b"\n" for record in records])
            counter = self._written if self._is_appended(lines) else self._dropped
            self._done_chars += sum(map(_num_chars, records))
            counter.inc(len(records))

    def _take(self) -> tuple[list[AuditRecord], bool]:
        """What waits, at least one thing; false with the last."""
        records: list[AuditRecord] = []
        record = self._queue.get()
        while record is not None:
            records.append(record)
            if len(records) == _BATCH:
                return records, True
            try:
                record = self._queue.get_nowait()
            except Empty:
                return records, True
        return records, False

    def _is_appended(self, lines: bytes) -> bool:
        try:
            self._append(lines)
        except OSError as error:
            _log.error("audit records are lost", why=error.strerror, path=str(self._path))
            return False
        return True

    def _append(self, lines: bytes) -> None:
        if not lines:
            return
        if self._fd is None or self._moved(self._fd):
            self._reopen()
        assert self._fd is not None
        # What failed before may have left half a line behind.
        view = memoryview(b"\n" + lines if self._torn else lines)
        self._torn = True
        while view:
            view = view[os.write(self._fd, view) :]
        self._torn = False

    def _moved(self, fd: int) -> bool:
        try:
            here = os.stat(self._path)
        except FileNotFoundError:
            return True
        ours = os.fstat(fd)
        return (here.st_ino, here.st_dev) != (ours.st_ino, ours.st_dev)

    def _reopen(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, _PRIVATE_FILE)


def _num_chars(record: AuditRecord) -> int:
    return 0 if record.content is None else record.content.num_chars


def audit_record(
    account: RequestAccount | None, name: str, where: str, status: int, now_s: float
) -> AuditRecord:
    """The record of a request that has been answered.

    Args:
        account: What is known of it; None if the credential was not recognised.
        name: The request id that its reply carried.
        where: Method and declared path.
        status: Of the reply.
        now_s: On the router's clock.
    """
    answered_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    if account is None:
        return AuditRecord(time=answered_at, request_id=name, where=where, status=status)
    timings = [run.timing for run in account.runs if run.timing is not None]
    return AuditRecord(
        time=answered_at,
        request_id=name,
        where=where,
        status=status,
        tenant=account.tenant.tenant_id,
        key=account.caller.key_id,
        model=account.model,
        job=account.runs[0].request.request_id if account.runs else "",
        error="" if account.error is None else account.error.code,
        prompt_tokens=account.prompt_tokens,
        cached_tokens=sum(timing.reused_tokens for timing in timings),
        output_tokens=account.output_tokens,
        duration_s=round(now_s - account.arrived_s, 6),
        first_token_s=round(timings[0].first_token_s, 6) if timings else None,
        content=_content(account),
    )


def _content(account: RequestAccount) -> AuditContent | None:
    if not account.asked and not account.answered:
        return None
    answered = tuple(account.answered[index].getvalue() for index in sorted(account.answered))
    return AuditContent(asked=account.asked, answered=answered)
