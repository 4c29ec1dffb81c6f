"""An engine without a model: the real scheduler, whose steps take what a formula says. For benchmarks of what is scheduled."""

from dataclasses import dataclass, field
from itertools import pairwise

from baton.generation import Prompt
from baton.ids import LayerName, SeqId
from baton.layout import KvLayout
from baton_engine.messages import Generate
from baton_engine.scheduling.limits import Limits
from baton_engine.scheduling.ordering import SchedulingPolicy
from baton_engine.scheduling.plan import StepPlan, StepResult
from baton_engine.scheduling.scheduler import Scheduler
from baton_engine.scheduling.step_cost import attended_pairs, is_decode

_TOKEN = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpeed:
    """What a step takes, in seconds. The defaults are about a model of 8B parameters on an H200: 15 GB of weights and 128 KiB of
    KV per token at 4 TB/s, prompts at 0.65 of the matrix rate.

    Attributes:
        step_s: Per step.
        row_s: Per sequence that decodes.
        context_s: Per token of context that decodes attend to.
        token_s: Per token of a prompt.
        pair_s: Per pair of a prompt's token and one that it attends to.
    """

    step_s: float = 4e-3
    row_s: float = 1e-5
    context_s: float = 3.3e-8
    token_s: float = 3e-5
    pair_s: float = 1e-9

    def of(self, plan: StepPlan) -> float:
        """Seconds of one step."""
        seconds = self.step_s
        for row in plan.rows:
            if is_decode(row):
                seconds += self.row_s + self.context_s * (row.start + 1)
            else:
                seconds += self.token_s * row.num_tokens
                seconds += self.pair_s * attended_pairs(row.num_tokens, row.start)
        return seconds


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


class SimulatedEngine:
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

    def __init__(self, limits: Limits, policy: SchedulingPolicy, speed: StepSpeed) -> None:
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

    def submit(self, seq_id: SeqId, prompt: Prompt) -> None:
        """A request comes now."""
        self.lives[seq_id] = Life(arrived_s=self.now_s)
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
