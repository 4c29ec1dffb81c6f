"""A whole loop over any runner, turned until nothing is left to do: what was drawn, and how it was launched."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from baton.clock import ManualClock
from baton.errors import BatonError
from baton.generation import Prompt, TokenSample
from baton_engine.loop import EngineLoop
from baton_engine.messages import Command, Failed, StepEvents
from baton_engine.ports import GrammarCompiler, KvSource, TokenConstraint
from baton_engine.scheduling.plan import Drafter, Launched, StepPlan, StepResult, StepRunner
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


class AtOnce:
    """A `GrammarCompiler` that has compiled when it returns,
    so that all prompts of a test are there in its first step.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler

    def find_masks_beside(self, told: Callable[[], None]) -> None:
        pass

    def compile(self, prompt: Prompt, done: Callable[[TokenConstraint | BatonError], None]) -> None:
        compiled: Future[TokenConstraint | BatonError] = Future()
        self._compiler.compile(prompt, compiled.set_result)
        done(compiled.result(timeout=20))

    def close(self) -> None:
        pass


def draw_all(
    scheduler: Scheduler,
    runner: StepRunner,
    commands: Sequence[Command],
    *,
    ahead: bool,
    grammars: GrammarCompiler | None = None,
    drafter: Drafter | None = None,
) -> tuple[dict[tuple[str, int], list[TokenSample]], int]:
    """All that is drawn once every sequence has ended, by sequence and sample,
    and how many steps were launched ahead.
    """
    drawn: dict[tuple[str, int], list[TokenSample]] = {}

    def hear(told: StepEvents) -> None:
        for event in all_events(told):
            assert not isinstance(event, Failed), event.error
            if isinstance(event, Sampled):
                for token in event.tokens:
                    drawn.setdefault((event.seq_id, token.sample), []).append(token)

    noting = Noting(runner)
    at_once = None if grammars is None else AtOnce(grammars)
    loop = EngineLoop(
        scheduler, noting, hear, ManualClock(), grammars=at_once, drafter=drafter, ahead=ahead
    )
    for command in commands:
        loop.submit(command)
    for _ in range(MOST_TURNS):
        if not loop.turn():
            assert scheduler.load().blocks_used == 0
            return drawn, noting.num_ahead
        scheduler.check_integrity()
    raise AssertionError("still running")
