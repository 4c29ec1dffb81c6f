"""A whole loop over any runner, turned until nothing is left to do: what was drawn, and how it was launched."""

from collections.abc import Sequence

from baton.clock import ManualClock
from baton.generation import TokenSample
from baton_engine.loop import EngineLoop
from baton_engine.messages import Command, Failed, StepEvents
from baton_engine.ports import KvSource
from baton_engine.scheduling.plan import Launched, StepPlan, StepResult, StepRunner
from baton_engine.scheduling.scheduler import Scheduler
from tests.baton_engine.sampled import Sampled, all_events

MOST_TURNS = 2000


class Noting:
    """A `StepRunner` that counts.

    Attributes:
        num_ahead: Steps launched before the tokens of the ones before them were known.
    """

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self.num_ahead = 0

    def execute(self, plan: StepPlan) -> StepResult:
        return self._runner.execute(plan)

    def launch(self, plan: StepPlan) -> Launched:
        self.num_ahead += bool(plan.follows)
        return self._runner.launch(plan)

    def fetch_from(self, source: KvSource) -> None:
        self._runner.fetch_from(source)


def draw_all(
    scheduler: Scheduler, runner: StepRunner, commands: Sequence[Command], *, ahead: bool
) -> tuple[dict[tuple[str, int], list[TokenSample]], int]:
    """All that is drawn once every sequence has ended, by sequence and sample, and how many steps were launched ahead."""
    drawn: dict[tuple[str, int], list[TokenSample]] = {}

    def hear(told: StepEvents) -> None:
        for event in all_events(told):
            assert not isinstance(event, Failed), event.error
            if isinstance(event, Sampled):
                for token in event.tokens:
                    drawn.setdefault((event.seq_id, token.sample), []).append(token)

    noting = Noting(runner)
    loop = EngineLoop(scheduler, noting, hear, ManualClock(), ahead=ahead)
    for command in commands:
        loop.submit(command)
    for _ in range(MOST_TURNS):
        if not loop.turn():
            assert scheduler.load().blocks_used == 0
            return drawn, noting.num_ahead
        scheduler.check_integrity()
    raise AssertionError("still running")
