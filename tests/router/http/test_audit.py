"""The audit log: who used what, and nothing more unless the operator asks."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.telemetry.metrics import new_registry
from router.http.audit import AuditContent, AuditLog, AuditRecord
from tests.router.http.test_account import KEY, parts
from tests.router.served import serve


def _record(number: int) -> AuditRecord:
    return AuditRecord(time="now", request_id=str(number), where="POST /x", status=200)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_record_is_a_line_and_the_file_is_its_owners_only(tmp_path):
    log = AuditLog(tmp_path / "audit.log", new_registry())
    for number in range(1000):
        log.write(_record(number))
    log.close()
    names = [line["request_id"] for line in _lines(tmp_path / "audit.log")]
    assert names == [str(number) for number in range(1000)]
    assert (tmp_path / "audit.log").stat().st_mode & 0o777 == 0o600


def test_after_a_rotation_it_goes_on_in_a_new_file(tmp_path):
    registry = new_registry()
    log = AuditLog(tmp_path / "audit.log", registry)
    log.write(_record(1))
    _wait_until(lambda: registry.get_sample_value("baton_audit_records_total") == 1)
    os.rename(tmp_path / "audit.log", tmp_path / "audit.log.1")
    log.write(_record(2))
    log.close()
    assert [line["request_id"] for line in _lines(tmp_path / "audit.log.1")] == ["1"]
    assert [line["request_id"] for line in _lines(tmp_path / "audit.log")] == ["2"]


def _wait_until(holds) -> None:
    pause = threading.Event()
    for _ in range(3000):
        if holds():
            return
        pause.wait(0.01)
    raise AssertionError("it never came")


def test_what_cannot_be_written_is_counted_and_fails_nobody(tmp_path, caplog):
    registry = new_registry()
    log = AuditLog(tmp_path / "missing" / "audit.log", registry)
    log.write(_record(1))
    _wait_until(lambda: registry.get_sample_value("baton_audit_dropped_total") == 1)
    (tmp_path / "missing").mkdir()
    log.write(_record(2))
    log.close()
    assert "audit records are lost" in caplog.text
    (line,) = _lines(tmp_path / "missing" / "audit.log")
    assert line["request_id"] == "2"


@pytest.mark.parametrize("records", [1, 100])
def test_a_file_that_takes_nothing_keeps_nobody_from_leaving(tmp_path, caplog, records):
    """With a queue that has room for the end, and without."""
    os.mkfifo(tmp_path / "dead")
    log = AuditLog(tmp_path / "dead", new_registry(), max_queued=10, close_timeout_s=0.1)
    for number in range(records):
        log.write(_record(number))
    log.close()
    assert "audit records are lost" in caplog.text
    with (tmp_path / "dead").open() as reader:  # which lets the writer go
        assert json.loads(reader.readline())["request_id"] == "0"
        log.close()


def test_more_than_can_wait_is_dropped_and_counted(tmp_path):
    registry = new_registry()
    os.mkfifo(tmp_path / "slow")
    log = AuditLog(tmp_path / "slow", registry, max_queued=10)
    for number in range(1000):  # nobody reads the pipe, so the writer waits to open it
        log.write(_record(number))
    dropped = registry.get_sample_value("baton_audit_dropped_total")
    with (tmp_path / "slow").open() as reader:
        log.close()
        written = len(reader.read().split("\n")) - 1
    assert dropped
    assert written + dropped == 1000


def test_of_what_was_asked_no_more_waits_than_may_however_few_the_records_are(tmp_path):
    registry = new_registry()
    os.mkfifo(tmp_path / "slow")
    log = AuditLog(tmp_path / "slow", registry, max_queued_chars=1000)
    for number in range(10):
        content = AuditContent(asked="x" * 200, answered=("y" * 100, "z" * 100))
        log.write(msgspec.structs.replace(_record(number), content=content))
    assert registry.get_sample_value("baton_audit_dropped_total") == 8
    log.write(_record(10))  # without content it takes no room
    with (tmp_path / "slow").open() as reader:
        _wait_until(lambda: registry.get_sample_value("baton_audit_records_total") == 3)
        content = AuditContent(asked="x" * 2000, answered=())
        log.write(msgspec.structs.replace(_record(11), content=content))  # alone it may have more
        log.close()
        names = [json.loads(line)["request_id"] for line in reader]
    assert names == ["0", "1", "10", "11"]


async def _audited(
    tmp_path: Path, limits: str = "weight: 1", **more
) -> tuple[list[dict[str, Any]], str]:
    path = tmp_path / "audit.log"
    log = AuditLog(path, new_registry())
    async with serve(parts=parts(limits) | {"audit": log} | more) as served:
        served.says("the answer")
        message = {"role": "user", "content": "the question"}
        reply = await served.chat({**KEY, "X-Request-Id": "mine"}, messages=[message])
        await served.chat(KEY, messages=[message], stream=True)
        await served.chat({"Authorization": "Bearer wrong-key"})
        await served.chat(KEY, temperature=9)
    log.close()
    return [reply.json(), *_lines(path)], path.read_text()


async def test_a_record_says_who_what_and_how_it_went(tmp_path):
    (reply, whole, streamed, stranger, bad), _ = await _audited(tmp_path)
    assert whole["tenant"] == "acme"
    assert len(whole["key"]) == 8
    assert whole["request_id"] == "mine"
    assert whole["job"] == reply["id"]
    assert (whole["where"], whole["status"]) == ("POST /v1/chat/completions", 200)
    assert whole["model"] == "tiny"
    assert whole["prompt_tokens"] == reply["usage"]["prompt_tokens"]
    assert whole["output_tokens"] == reply["usage"]["completion_tokens"]
    assert whole["first_token_s"] > 0
    assert streamed["output_tokens"] == whole["output_tokens"]
    assert (stranger["status"], stranger.get("tenant")) == (401, None)
    assert (bad["status"], bad["error"]) == (400, "invalid_request")


async def test_it_holds_neither_content_nor_keys_by_default(tmp_path):
    _, text = await _audited(tmp_path)
    for secret in ("the question", "the answer", "Bearer", "wrong-key"):
        assert secret not in text


@pytest.mark.parametrize("whose", ["tenant", "everybody"])
async def test_it_holds_content_where_the_operator_asks_for_it_but_never_keys(tmp_path, whose: str):
    asked = "audit_content: true" if whose == "tenant" else "weight: 1"
    lines, text = await _audited(tmp_path, asked, keep_content=whose == "everybody")
    for record in lines[1:3]:
        assert "the question" in record["content"]["asked"]
        assert record["content"]["answered"] == ["the answer"]
    assert "Bearer" not in text
    assert "wrong-key" not in text


async def test_a_log_that_cannot_be_written_fails_no_request(tmp_path):
    log = AuditLog(tmp_path / "missing" / "audit.log", new_registry())
    async with serve(parts=parts("weight: 1") | {"audit": log}) as served:
        assert (await served.chat(KEY)).status_code == 200
    log.close()
