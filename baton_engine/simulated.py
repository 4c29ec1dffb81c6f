"""An engine without a model: the real scheduler, cache and loop,
whose steps take what a formula says and draw made-up tokens.

What a worker of `baton run simulated` computes with: everything around the model is the real thing, hand-offs included.
Its pages are small and hold zeros. Imports no torch.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from baton.config.schema import EngineConfig, ModelConfig, SimulatedConfig
from baton.config.speculative import NgramSpeculation, SuffixSpeculation, read_speculative
from baton.errors import ConfigError
from baton.generation import TokenLogprobs
from baton.ids import LayerName
from baton.layout import SPARE_BLOCKS, KvLayout
from baton_engine.host import ThreadEngineHost
from baton_engine.layer_hooks import KvLayerHooks
from baton_engine.ports import ArenaAllocator, KvSource, LayerSink
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.scheduling.ordering import SchedulingPolicy
from baton_engine.scheduling.plan import Launched, StepPlan, StepResult
from baton_engine.scheduling.scheduler import Scheduler
from baton_engine.scheduling.step_cost import attended_pairs, is_decode

_BLOCK_TOKENS = 16
_VOCAB_SIZE, _MAX_MODEL_LEN = 32_000, 8192
"""Where there is no `config.json` to read them from."""

_SPREAD = 1_000_003


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpeed:
    """What a step takes, in seconds. The defaults are about a model of 8B parameters on an H200: 15 GB of weights and
    128 KiB of KV per token at 4 TB/s, prompts at 0.65 of the matrix rate.

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


class SimulatedRunner:
    """Takes the time of each step and draws tokens that depend on sample and position alone (a `StepRunner`), so that a
    retried request draws the same ones.

    Args:
        speed: What a step takes.
        vocab_size: Drawn tokens are below this.
        sink: Told of exported pages; None where nothing is handed off.
        sleep: Takes the time.
    """

    def __init__(
        self,
        speed: StepSpeed,
        *,
        vocab_size: int,
        sink: LayerSink | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._speed = speed
        self._vocab_size = vocab_size
        self._sink = sink
        self._sleep = sleep
        self._source: KvSource | None = None

    def fetch_from(self, source: KvSource) -> None:
        """See StepRunner."""
        self._source = source

    def launch(self, plan: StepPlan) -> Launched:
        """See StepRunner. Its time passes when its outcome is asked for."""
        return partial(self.execute, plan)

    def execute(self, plan: StepPlan) -> StepResult:
        """See StepRunner."""
        hooks = KvLayerHooks(plan, self._source, self._sink)
        with hooks:
            hooks.before(0)
            self._sleep(self._speed.of(plan))
            hooks.after(0)
        lost = hooks.outcome.failed if hooks.outcome is not None else {}
        drawn = [(row, sample) for row in plan.rows for sample in row.samples]
        return StepResult(
            tokens=[self._draw(sample, row.start + row.num_tokens) for row, sample in drawn],
            logprobs={
                place: _made_up_score(row.seq.params.logprobs)
                for place, (row, _) in enumerate(drawn)
                if row.seq.params.logprobs is not None
            },
            scores=tuple(
                (_made_up_score(row.seq.params.prompt_logprobs or 0),) * row.num_scored
                for row in plan.rows
            ),
            failed=tuple(
                (place, lost[row.seq.seq_id])
                for place, row in enumerate(plan.rows)
                if row.seq.seq_id in lost
            ),
            fetched=hooks.outcome,
        )

    def _draw(self, sample: int, position: int) -> int:
        return (_SPREAD * position + sample) % self._vocab_size


@cache
def _made_up_score(count: int) -> TokenLogprobs:
    """Log-probabilities at any position, with `count` likeliest tokens."""
    return TokenLogprobs(
        logprob=0.0,
        rank=1,
        top_tokens=tuple(range(count)),
        top_logprobs=tuple(-float(i) for i in range(count)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngine:
    """An engine that is ready to start, as `baton_engine.build.BuiltEngine`; its pages lie in host memory."""

    host: ThreadEngineHost
    layout: KvLayout
    limits: EngineLimits


def build_simulated(
    model: ModelConfig,
    config: EngineConfig,
    simulated: SimulatedConfig,
    *,
    secret: bytes,
    memory: ArenaAllocator,
    sink: LayerSink | None,
) -> SimulatedEngine:
    """Takes the memory for its pages.

    Args:
        model: Its vocabulary and longest context are those of the model's `config.json`, where there is one.
        config: The engine's limits.
        simulated: How fast it is.
        secret: The cluster secret, 32 bytes.
        memory: Where the pages lie.
        sink: Told of exported pages; None where nothing is handed off.

    Raises:
        OutOfMemoryError: The pages do not fit this machine.
        ConfigError: Tokens are to be guessed by a model.
    """
    speculation = read_speculative(config.speculative_config)
    if not isinstance(speculation, NgramSpeculation | SuffixSpeculation | None):
        param = "engine.speculative_config.method"
        raise ConfigError(f"{param}: a simulated worker has no draft model", param=param)
    vocab_size, longest = _sizes(Path(model.model))
    layout = KvLayout(
        model_fingerprint=f"simulated {model.served_model_name}",
        dtype="float32",
        block_tokens=config.block_size or _BLOCK_TOKENS,
        num_kv_heads=1,
        head_dim=8,
        layers=(LayerName("simulated"),),
    )
    limits = EngineLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=model.max_model_len or longest,
        block_tokens=layout.block_tokens,
        num_blocks=simulated.num_blocks,
        vocab_size=vocab_size,
    )
    memory.allocate(layout.region_bytes(limits.num_blocks + SPARE_BLOCKS))
    speed = StepSpeed(
        step_s=simulated.step_s,
        row_s=simulated.sequence_s,
        context_s=0.0,
        token_s=1.0 / simulated.prefill_tokens_per_s,
        pair_s=0.0,
    )
    scheduler = Scheduler(
        limits,
        layout=layout,
        secret=secret,
        enable_prefix_caching=config.enable_prefix_caching,
        policy=SchedulingPolicy(
            tbt_s=config.tbt_target_s,
            prefill_order=config.prefill_order,
            preemption=config.preemption,
            output_headroom=config.output_headroom,
        ),
        speculation=speculation,
    )
    runner = SimulatedRunner(speed, vocab_size=vocab_size, sink=sink)
    return SimulatedEngine(host=ThreadEngineHost(scheduler, runner), layout=layout, limits=limits)


def _sizes(path: Path) -> tuple[int, int]:
    """Vocabulary and longest context of the model that is stood in for."""
    try:
        said = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return _VOCAB_SIZE, _MAX_MODEL_LEN
    return (
        int(said.get("vocab_size", _VOCAB_SIZE)),
        int(said.get("max_position_embeddings", _MAX_MODEL_LEN)),
    )
