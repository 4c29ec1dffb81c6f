import io
import json
import logging
import re

import pytest

from baton.config.schema import LogConfig
from baton.telemetry.logs import configure, get_logger


@pytest.fixture
def lines():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()

    def start(**config: str):
        configure(LogConfig(**config), "decode-0", stream=stream)
        return lambda: stream.getvalue().splitlines()

    yield start
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)


def test_a_text_line_has_time_level_process_component_event_and_fields(lines):
    read = lines()
    get_logger("baton_engine.loop").info("weights loaded", size_bytes=12, share=0.25, path="a b")
    pattern = (
        r"\d\d:\d\d:\d\d\.\d{3} INFO    decode-0\[\d+\] baton_engine\.loop: weights loaded"
        r' size_bytes=12 share=0\.25 path="a b"'
    )
    assert re.fullmatch(pattern, read()[0])


def test_a_value_from_outside_cannot_steer_a_terminal(lines):
    read = lines()
    get_logger("x").info("failed", path="/\x1b[2J\x9b31m\r\x7f")
    assert read()[0].isprintable()


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.usefixtures("lines")
def test_on_a_terminal_a_line_wipes_the_progress_that_it_begins_on():
    terminal = Terminal()
    configure(LogConfig(), "router", stream=terminal)
    get_logger("x").info("worker joined")
    assert terminal.getvalue().startswith("\r\x1b[2K")


def test_a_json_line_is_one_object_with_the_same_facts(lines):
    read = lines(format="json")
    get_logger("router").warning("worker lost", worker="decode-0", in_flight=3)
    entry = json.loads(read()[0])
    assert (entry["level"], entry["component"], entry["event"]) == (
        "warning",
        "router",
        "worker lost",
    )
    assert entry["fields"] == {"worker": "decode-0", "in_flight": 3}


def test_what_is_below_the_level_is_not_written(lines):
    read = lines(level="warning")
    get_logger("x").info("quiet")
    get_logger("x").warning("loud")
    assert len(read()) == 1


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_field_that_would_hold_what_a_client_wrote_is_never_written(lines, form):
    read = lines(format=form)
    get_logger("x").info("request", prompt="top secret", content="top secret", tokens=5)
    assert "top secret" not in read()[0]
    assert "redacted" in read()[0]


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_field_with_line_breaks_cannot_forge_a_line(lines, form):
    read = lines(format=form)
    get_logger("x").info("peer\nsaid", reason="no\n12:00:00.000 ERROR fake")
    assert len(read()) == 1


def test_an_error_with_a_cause_carries_its_traceback(lines):
    read = lines(format="json")
    try:
        raise ValueError("broken")
    except ValueError as error:
        get_logger("x").error("step failed", cause=error)
    assert "ValueError: broken" in json.loads(read()[0])["exception"]


def test_other_libraries_are_logged_in_the_same_form(lines):
    read = lines(format="json")
    logging.getLogger("grpc._server").warning("took %d s", 3)
    assert json.loads(read()[0])["event"] == "took 3 s"
    logging.getLogger("httpx").info("HTTP Request: GET ...")
    assert len(read()) == 1


def test_configuring_again_replaces_what_was_configured_before(lines):
    lines(format="json")
    read = lines(format="text")
    get_logger("x").info("once")
    assert len(read()) == 1
