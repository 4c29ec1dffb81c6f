"""Grammars are looked at in processes that they may end, and those go on for others."""

import os
import signal
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher

from baton.clock import ManualClock
from baton.config.schema import GrammarConfig
from baton.errors import InvalidRequestError, RateLimitedError, UnavailableError
from baton.grammar import parser_limits
from baton.telemetry.metrics import new_registry
from router.generation.answer_form import AnswerForm
from router.generation.grammar_faults import GrammarFaults
from router.generation.grammars import GrammarChecker
from router.templates.child import AskedProcess
from tests.deep_grammars import LARKS, lark

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


def test_a_process_that_was_killed_is_replaced(faults, started, monkeypatch: pytest.MonkeyPatch):
    assert faults.first([GOOD]).fault == ""
    alive = AskedProcess.alive

    def killed(process: AskedProcess) -> bool:
        """It ends as soon as it was found alive."""
        is_alive = alive(process)
        os.kill(process._process.pid, signal.SIGKILL)
        return is_alive

    with monkeypatch.context() as patched:
        patched.setattr(AskedProcess, "alive", killed)
        assert "ended the process" in faults.first([GOOD]).fault
    assert faults.first([GOOD]).fault == ""


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
