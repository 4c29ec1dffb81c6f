import os
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from baton.errors import InvariantError
from baton.ids import SeqId
from baton_engine.fakes.engine import FakeEngine, FakeRunner
from baton_engine.host import ThreadEngineHost
from baton_engine.messages import Generate, PrefillStarted, StepEvents
from baton_engine.ports import EnginePort
from baton_engine.scheduling.plan import StepPlan, StepResult
from baton_engine.scheduling.scheduler import Scheduler
from tests.baton_engine.sampled import Sampled, all_events
from tests.baton_engine.scheduling_world import SECRET, World, layout, limits, prompt

TIMEOUT_S = 30


def scheduler() -> Scheduler:
    return Scheduler(limits(), layout=layout(limits().block_tokens), secret=SECRET)


@pytest.fixture
def host() -> Iterator[ThreadEngineHost]:
    host = ThreadEngineHost(scheduler(), FakeRunner(limits()))
    yield host
    host.close()


def test_an_engine_without_a_listener_ends_with_the_first_event(host: ThreadEngineHost):
    host.start()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "engine"]
    host.submit(Generate(seq_id=SeqId("1"), prompt=prompt(8)))
    thread.join(TIMEOUT_S)
    assert isinstance(host.failure(), InvariantError)


def test_a_hosted_engine_answers_from_its_own_thread(host: ThreadEngineHost):
    shares: SimpleQueue[tuple[str, StepEvents]] = SimpleQueue()
    host.attach(lambda told: shares.put((threading.current_thread().name, told)))
    host.start()
    host.submit(Generate(seq_id=SeqId("d/1"), prompt=prompt(8)))
    tokens: list[int] = []
    while len(tokens) < 5:
        thread, share = shares.get(timeout=TIMEOUT_S)
        assert thread == "engine"
        tokens += [t.token for e in all_events(share) if isinstance(e, Sampled) for t in e.tokens]
    assert tokens == World(limits()).undisturbed(prompt(8))


def test_closing_ends_the_thread_and_is_no_failure(host: ThreadEngineHost):
    host.start()
    host.close()
    assert "engine" not in {thread.name for thread in threading.enumerate()}
    assert host.failure() is None


def test_a_host_that_never_started_can_be_closed(host: ThreadEngineHost):
    host.close()
    assert host.progress_s() is None


def test_a_listener_that_raises_is_the_engines_failure(host: ThreadEngineHost):
    ended = threading.Event()

    def listen(told: StepEvents) -> None:
        ended.set()
        raise RuntimeError("the service is gone")

    host.attach(listen)
    host.start()
    host.submit(Generate(seq_id=SeqId("d/1"), prompt=prompt(8)))
    assert ended.wait(TIMEOUT_S)
    host.close()
    assert isinstance(host.failure(), RuntimeError)


def test_a_fake_engine_is_stepped_by_hand():
    engine = FakeEngine(scheduler(), FakeRunner(limits()))
    port: EnginePort = engine
    shares: list[StepEvents] = []
    port.attach(shares.append)
    port.submit(Generate(seq_id=SeqId("p/1"), prompt=prompt(8, max_tokens=2)))
    assert shares == []
    assert engine.step()
    assert [type(event) for share in shares for event in all_events(share)] == [
        PrefillStarted,
        Sampled,
    ]
    engine.run_until_idle()
    assert engine.scheduler.load().blocks_used == 0
    assert port.failure() is None


class RunnerThatLooksWhereItIs(FakeRunner):
    """Notes on which cores the thread that computes may run."""

    cores: frozenset[int] = frozenset()

    def execute(self, plan: StepPlan) -> StepResult:
        self.cores = frozenset(os.sched_getaffinity(0))
        return super().execute(plan)


def test_only_the_engines_thread_is_bound_to_its_cores():
    everywhere = os.sched_getaffinity(0)
    core = max(everywhere)
    runner = RunnerThatLooksWhereItIs(limits())
    host = ThreadEngineHost(scheduler(), runner)
    finished = threading.Event()
    host.attach(lambda told: finished.set() if told.events else None)
    host.start((core,))
    try:
        host.submit(Generate(seq_id=SeqId("a/1"), prompt=prompt(8)))
        assert finished.wait(TIMEOUT_S)
    finally:
        host.close()
    assert runner.cores == {core}
    assert os.sched_getaffinity(0) == everywhere
