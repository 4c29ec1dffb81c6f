"""What a worker's service tells of what happened."""

import pytest
from prometheus_client import CollectorRegistry

from baton.clock import ManualClock
from baton.ids import BlockKey, SeqId
from baton.story import StoryEntry
from baton_engine.messages import Command
from baton_worker.legs import WorkerLegTable
from baton_worker.metrics import WorkerMetrics
from baton_worker.service import WorkerService
from kv_transfer.ticket import TicketOffice
from tests.baton_worker.test_streams import HELLO
from tests.decode_worker.cluster import SECRET

KEY = BlockKey(bytes(range(16)))
ENTRY = StoryEntry(core="engine", at_s=1.0, event="published", actions=())


class Engine:
    """Knows of one block, and breaks when it is asked of another."""

    def submit(self, command: Command) -> None:
        raise NotImplementedError

    def attach(self, listener) -> None:
        self.listener = listener

    def progress_s(self) -> float | None:
        return None

    def failure(self) -> BaseException | None:
        return None

    def story(self, about: SeqId | BlockKey) -> tuple[StoryEntry, ...]:
        if about != KEY:
            raise ValueError("the engine's own fault")
        return (ENTRY,)

    def close(self) -> None:
        raise NotImplementedError


def service() -> WorkerService:
    return WorkerService(
        engine=Engine(),
        hello=HELLO,
        legs=WorkerLegTable(),
        sending=None,
        receiving=None,
        office=TicketOffice(SECRET),
        metrics=WorkerMetrics(CollectorRegistry(), block_tokens=4, num_blocks=10),
        clock=ManualClock(),
    )


def test_a_name_is_that_of_a_block_or_of_a_request():
    assert service().story_of(KEY.hex()) == [ENTRY]
    assert service().story_of("request/1") == []


def test_a_fault_of_the_engine_is_not_taken_for_the_name_of_a_request():
    with pytest.raises(ValueError, match="own fault"):
        service().story_of(bytes(16).hex())
