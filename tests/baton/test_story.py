from dataclasses import dataclass

from baton.errors import InvariantError
from baton.story import StoryLog, describe


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    request_id: str
    attempt: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    error: InvariantError | None


def test_a_story_is_that_of_one_id_in_order():
    log = StoryLog("core")
    log.record("a", 1.0, Submitted(request_id="a", attempt=1, tokens=(1, 2)), [Send(worker="p")])
    log.record("b", 2.0, "left")
    log.record("a", 3.0, "ended")
    assert [str(entry) for entry in log.story("a")] == [
        "1.000000 Submitted(attempt=1, tokens=<2>) -> Send(worker=p)",
        "3.000000 ended",
    ]
    assert log.story("c") == ()


def test_kinds_alone_are_told_of_what_carries_no_error():
    log = StoryLog("core")
    failed = Failed(error=InvariantError("two owners"))
    log.record_kinds("a", 1.0, Submitted(request_id="a", attempt=1, tokens=(1,)), [failed])
    log.record_kinds("a", 2.0, Failed(error=None))
    assert [str(entry) for entry in log.story("a")] == [
        "1.000000 Submitted -> Failed(error=two owners)",
        "2.000000 Failed",
    ]


def test_the_oldest_entries_are_forgotten():
    log = StoryLog("core", capacity=2)
    for number in range(5):
        log.record("a", float(number), "tick")
    assert [entry.at_s for entry in log.story("a")] == [3.0, 4.0]


def test_neither_tokens_nor_long_texts_are_told():
    told = describe(Submitted(request_id="x" * 500, attempt=1, tokens=(271828,)))
    assert "271828" not in told
    assert len(told) < 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    send: Send
    message: Send
    trace_parent: str = ""
    error: InvariantError | None = None


def test_what_says_nothing_is_left_out():
    told = describe(Told(send=Send(worker="p"), message=Send(worker="p")))
    assert told == "Told(message=<Send>)"


def test_an_entry_names_the_core_that_tells_it():
    log = StoryLog("engine")
    log.record("a", 1.0, "opened")
    assert [entry.core for entry in log.story("a")] == ["engine"]


def test_an_invariant_error_tells_the_story_it_carries():
    log = StoryLog("core")
    log.record("a", 1.0, "opened")
    error = InvariantError("a page is free twice", story=log.story("a"))
    assert "1.000000 opened" in error.story_text
    assert str(error) == "a page is free twice"
