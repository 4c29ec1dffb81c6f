"""Grammars are looked at in processes that they may end, and those go on for others."""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits

from baton.clock import ManualClock
from baton.config.schema import GrammarConfig
from baton.errors import InvalidRequestError, RateLimitedError, UnavailableError
from baton.grammar import parser_limits
from baton.telemetry.metrics import new_registry
from router.generation import grammar_faults
from router.generation.answer_form import AnswerForm
from router.generation.grammar_faults import GrammarFaults, Verdict
from router.generation.grammars import GrammarChecker
from router.templates.child import AskedProcess
from tests.deep_grammars import LARKS, lark
from tests.waits import soon

GOOD, BAD = map(LLMatcher.grammar_from_regex, ("a", "a("))
DEEP = LLMatcher.grammar_from_lark(LARKS["rules"])
LONG = LLMatcher.grammar_from_json_schema(
    {"properties": {f"{number}": {"type": "string"} for number in range(1500)}}
)
"""Its check takes a tenth of a second and more."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[AskedProcess]:
    """Every process that is started."""
    processes: list[AskedProcess] = []

    class Noted(AskedProcess):
        def __init__(self, *args, **settings) -> None:
            super().__init__(*args, **settings)
            processes.append(self)

    monkeypatch.setattr("router.generation.grammar_faults.AskedProcess", Noted)
    return processes


@pytest.fixture
def faults(started: list[AskedProcess]) -> Iterator[GrammarFaults]:
    made = GrammarFaults(parser_limits(GrammarConfig()))
    yield made
    made.close()
    assert not any(process.alive() for process in started)


def test_the_first_grammar_that_is_not_taken_is_told_and_one_process_asked(faults, started):
    assert faults.first([]).fault == ""
    assert faults.first([GOOD, GOOD]).fault == ""
    verdict = faults.first([GOOD, BAD, DEEP])
    assert (verdict.place, "regex parse error" in verdict.fault) == (1, True)
    assert verdict.seconds > 0.0
    assert len(started) == 1


def test_the_limits_hold_where_they_are_asked_for():
    narrow = GrammarFaults(parser_limits(GrammarConfig(max_symbols=1)))
    assert "grammar size" in narrow.first([GOOD]).fault
    assert narrow.first([GOOD], limited=False).fault == ""
    narrow.close()


def test_how_deep_a_grammar_may_lead_is_a_matter_of_the_stack():
    shallow = GrammarFaults(parser_limits(GrammarConfig()), stack_bytes=1024 * 1024)
    grammar = LLMatcher.grammar_from_lark(lark("r", 1000))
    assert "more than 1 MiB of stack" in shallow.first([grammar]).fault
    shallow.close()
    usual = GrammarFaults(parser_limits(GrammarConfig()))
    assert usual.first([grammar]).fault == ""
    usual.close()


def test_whose_grammar_ends_a_process_has_the_next_one_started(faults, started):
    verdict = faults.first([DEEP])
    assert "more than 8 MiB of stack" in verdict.fault
    assert verdict.seconds > 0.0
    assert [process.alive() for process in started] == [False, True]
    assert faults.first([GOOD]).fault == ""
    assert len(started) == 2


def test_a_check_that_takes_too_long_is_ended(started):
    hasty = GrammarFaults(parser_limits(GrammarConfig()), limit_s=0.005)
    assert "more than 0.005 seconds" in hasty.first([LONG]).fault
    assert not started[0].alive()
    hasty.close()


def test_what_a_check_costs_that_is_ended_is_processor_time_and_that_of_the_next_process(started):
    waiting = GrammarFaults(parser_limits(GrammarConfig()), limit_s=0.5)
    assert waiting.first([GOOD]).fault == ""
    os.kill(started[0]._process.pid, signal.SIGSTOP)
    verdict = waiting.first([GOOD])
    assert "more than 0.5 seconds" in verdict.fault
    assert verdict.place is None
    assert 0.0 < verdict.seconds <= started[1].cpu_s()
    waiting.close()


@pytest.mark.parametrize("kind", ["regex", "json"])
async def test_whose_process_ends_while_keywords_are_looked_at_alone_is_told_the_fault_and_pays(
    kind, monkeypatch: pytest.MonkeyPatch
):
    """And none of the keywords is blamed, since none is known to be why."""
    checker = GrammarChecker(GrammarConfig(), (), new_registry())
    first = checker._faults.first
    asked: list[list[str]] = []

    def ending(grammars: Sequence[str], *, limited: bool = True) -> Verdict:
        asked.append(list(grammars))
        if limited:
            return first(grammars)
        return Verdict(fault="it ended the process", place=None, seconds=1.0)

    monkeypatch.setattr(checker._faults, "first", ending)
    value: Any = "a(" if kind == "regex" else {"type": "string", "pattern": "a("}
    outcome, seconds = checker._made(AnswerForm(kind=kind, value=value, param="field"))
    assert isinstance(outcome, InvalidRequestError)
    assert outcome.message.startswith("field: ")
    assert "regex parse error" in outcome.message
    assert (len(asked), seconds > 1.0) == ((1, False) if kind == "regex" else (2, True))
    checker.close()


def test_the_processes_are_told_every_limit():
    limits = {name for name in dir(LLParserLimits) if not name.startswith("_")}
    assert set(grammar_faults._LIMIT_NAMES) == limits


def test_a_process_that_was_killed_is_replaced(faults, started, monkeypatch: pytest.MonkeyPatch):
    assert faults.first([GOOD]).fault == ""
    alive = AskedProcess.alive

    def killed(process: AskedProcess) -> bool:
        """It ends as soon as it was found alive."""
        is_alive = alive(process)
        if is_alive and process is started[0]:
            os.kill(process._process.pid, signal.SIGKILL)
        return is_alive

    with monkeypatch.context() as patched:
        patched.setattr(AskedProcess, "alive", killed)
        assert "ended the process" in faults.first([GOOD]).fault
    assert faults.first([GOOD]).fault == ""


@pytest.mark.timeout(60)
async def test_closing_waits_for_no_check_whose_process_hangs(started, monkeypatch):
    checker = GrammarChecker(GrammarConfig(), (), new_registry())
    checker._faults._limit_s = 600.0
    assert await checker.text_of(AnswerForm(kind="regex", value="a", param="field"), "tenant")
    os.kill(started[0]._process.pid, signal.SIGSTOP)
    asked = asyncio.Event()
    loop, ask = asyncio.get_running_loop(), AskedProcess.ask

    def told(process: AskedProcess, body: bytes, limit_s: float) -> bytearray:
        loop.call_soon_threadsafe(asked.set)
        return ask(process, body, limit_s)

    monkeypatch.setattr(AskedProcess, "ask", told)
    form = AnswerForm(kind="regex", value="b", param="field")
    check = asyncio.create_task(checker.text_of(form, "tenant"))
    await soon(asked.wait())
    checker.close()
    with pytest.raises(UnavailableError, match="closed"):
        await check
    assert [process.alive() for process in started] == [False]


async def test_a_grammar_that_ends_its_process_costs_its_tenant_time():
    config = GrammarConfig(check_s_per_minute_per_tenant=1e-6)
    checker = GrammarChecker(config, (), new_registry(), ManualClock())
    with pytest.raises(InvalidRequestError, match=r"^field: .*too deep"):
        await checker.text_of(AnswerForm(kind="grammar", value=LARKS["rules"], param="field"), "a")
    regex = AnswerForm(kind="regex", value="a", param="field")
    with pytest.raises(RateLimitedError):
        await checker.text_of(regex, "a")
    assert await checker.text_of(regex, "b")
    checker.close()


async def test_where_no_process_can_be_started_that_is_said_and_the_next_grammar_checked(
    monkeypatch: pytest.MonkeyPatch,
):
    checker = GrammarChecker(GrammarConfig(), (), new_registry())
    regex = AnswerForm(kind="regex", value="a", param="field")
    with monkeypatch.context() as patched:
        patched.setattr("sys.executable", "/nowhere/python")
        with pytest.raises(UnavailableError, match="No process to check grammars"):
            await checker.text_of(regex, "tenant")
    assert await checker.text_of(regex, "tenant")
    checker.close()


async def test_a_tenant_of_many_grammars_takes_none_of_another_s_place():
    registry = new_registry()
    checker = GrammarChecker(GrammarConfig(max_compiled=3), (), registry)

    async def ask(text: str, tenant: str) -> None:
        await checker.text_of(AnswerForm(kind="regex", value=text, param="field"), tenant)

    await ask("few", "few")
    for number in range(5):
        await ask(f"many{number}", "many")
    await ask("few", "few")
    assert registry.get_sample_value("baton_router_grammars_total", {"outcome": "known"}) == 1
    checker.close()
