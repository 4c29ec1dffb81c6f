"""An engine without a model: the real scheduler, whose steps take what a formula says.
For benchmarks of what is scheduled.
"""

from dataclasses import dataclass, field
from itertools import pairwise

from baton.generation import Prompt
from baton.ids import LayerName, SeqId
from baton.layout import KvLayout
from baton_engine.messages import Generate
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.scheduling.ordering import SchedulingPolicy
from baton_engine.scheduling.plan import StepResult
from baton_engine.scheduling.scheduler import Scheduler
from baton_engine.scheduling.step_cost import is_decode
from baton_engine.simulated import StepSpeed

_TOKEN = 1


@dataclass(slots=True, eq=False)
class Life:
    """One request's times.

    Attributes:
        arrived_s: When it came.
        tokens_s: When each of its tokens was there.
    """

    arrived_s: float
    tokens_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """From its arrival to its first token."""
        return self.tokens_s[0] - self.arrived_s

    @property
    def gaps_s(self) -> list[float]:
        """Between its tokens."""
        return [after - before for before, after in pairwise(self.tokens_s)]


class SteppedEngine:
    """Steps by hand; every text runs to its `max_tokens`.

    Args:
        limits: Of the engine.
        policy: How it schedules.
        speed: The truth about its steps; the scheduler learns it.

    Attributes:
        now_s: The time.
        lives: Of the requests, by name.
        decode_seat_s: Seconds that seats spent on decoding, all of them together.
    """

    def __init__(self, limits: EngineLimits, policy: SchedulingPolicy, speed: StepSpeed) -> None:
        layout = KvLayout(
            model_fingerprint="simulated",
            dtype="bfloat16",
            block_tokens=limits.block_tokens,
            num_kv_heads=1,
            head_dim=1,
            layers=(LayerName("only"),),
        )
        self._scheduler = Scheduler(
            limits, layout=layout, secret=bytes(32), enable_prefix_caching=False, policy=policy
        )
        self._speed = speed
        self.now_s = 0.0
        self.lives: dict[SeqId, Life] = {}
        self.decode_seat_s = 0.0

    @property
    def preemptions(self) -> int:
        """How many there were."""
        return self._scheduler.load().preemptions

    def submit(self, seq_id: SeqId, prompt: Prompt, *, arrived_s: float | None = None) -> None:
        """A request comes now; or came at `arrived_s`, during the step that has just ended, and is taken up only now,
        as by the engine's loop.
        """
        self.lives[seq_id] = Life(arrived_s=self.now_s if arrived_s is None else arrived_s)
        refused = self._scheduler.handle(Generate(seq_id=seq_id, prompt=prompt), self.now_s)
        assert not refused, refused

    def step(self) -> bool:
        """One step, and its time passes; False if there is nothing to do."""
        plan, _ = self._scheduler.schedule(self.now_s)
        if plan is None:
            return False
        seconds = self._speed.of(plan)
        self.now_s += seconds
        self.decode_seat_s += seconds * sum(map(is_decode, plan.rows))
        result = StepResult(tokens=[_TOKEN for row in plan.rows for _ in row.samples])
        self._scheduler.measured(plan, result, seconds)
        sampled = self._scheduler.update_from_output(plan, result, self.now_s)
        for seq_id in () if sampled is None else dict.fromkeys(sampled.seq_ids):
            self.lives[seq_id].tokens_s.append(self.now_s)
        return True

    def run(self) -> None:
        """Steps until nothing is left."""
        while self.step():
            pass
        self._scheduler.check_integrity()
