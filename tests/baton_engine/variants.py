"""Counts the variants of Triton's kernels that steps ask for, without a GPU:
`python -m tests.baton_engine.variants STEPS WAY ...`.

Triton compiles a kernel anew for arguments that it has not seen the like of: for each dtype, and for numbers that are 1
or multiples of 16, and addresses that are, unless the kernel forbids it. What a launch would compile is asked of Triton
itself; nothing is compiled or run, so that outputs mean nothing (they are zeros). A process of its own, because the
tests' may have told Triton to interpret.

The ways are those in which an engine on a GPU computes steps (`Way`). An engine is built and warmed up as
`baton_engine.build` does it, then random steps go through its runner, and drafts through its drafter. Graphs do their
work again when they are repeated: it must not ask for more than it did when it was captured.

Writes JSON: of each way what `Replayed` says.
"""

import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict, TypeVar
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget

from baton.generation import Prompt, SamplingParams
from baton.ids import BlockId, SeqId
from baton.layout import SPARE_BLOCKS
from baton_engine.cache.arena import DrafterPages, KvArena
from baton_engine.cuda_graphs import MOST_CHUNKS, SMALL_PROMPTS, StepGraphs
from baton_engine.draft_model import DraftModel
from baton_engine.eagle3_drafter import SHIFT, Eagle3Drafter
from baton_engine.kernels.triton.kernel_set import InvariantTritonKernels, TritonKernels
from baton_engine.kernels.triton.page_sum import PageSums, sum_pages
from baton_engine.kernels.triton.random_draw import random_draw
from baton_engine.messages import Generate
from baton_engine.models.config import kv_layout
from baton_engine.models.decoder import Decoder
from baton_engine.models.eagle3 import Eagle3Head, load_eagle3_spec
from baton_engine.models.loader import load_eagle3
from baton_engine.runner import ModelRunner
from baton_engine.sampling.draws import RandomRows, draw_with_triton
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.scheduling.plan import DraftPlan, DraftRow, Row, StepPlan
from baton_engine.scheduling.request import Request, Sequence, State
from baton_engine.scheduling.speculation import draft_rows
from baton_engine.warm_up import warm_up
from bench.gpu.models import GpuShape, random_decoder
from tests.baton_engine.tiny_models import make_eagle3_head

T = TypeVar("T")
_CPU = torch.device("cpu")
_BLOCK_TOKENS, _LONGEST, _MOST_ROWS, _MOST_DRAFTS = 16, 400, 20, 3
_SHAPE = GpuShape(
    hidden=64, intermediate=96, layers=1, heads=4, kv_heads=2, head_dim=32,
    vocab=320, bias=True, tied=False,
)  # fmt: skip
_IN_TILES = replace(_SHAPE, hidden=512, intermediate=512)
"""Matrices of which few rows are multiplied by the kernels' own products."""
_WIDE = replace(_SHAPE, hidden=1056, intermediate=1056)
"""Matrices whose products are taken in pieces, for kernels of which none computes here."""
_LIMITS = EngineLimits(
    max_num_seqs=_MOST_ROWS,
    max_num_batched_tokens=5 * _LONGEST,
    max_model_len=_LONGEST,
    block_tokens=_BLOCK_TOKENS,
    num_blocks=_MOST_ROWS * -(-_LONGEST // _BLOCK_TOKENS),
    vocab_size=_SHAPE.vocab,
)
_GREEDY = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
_RANDOM = replace(_GREEDY, temperature=0.8)
_PARAMS = (
    *(_GREEDY, replace(_GREEDY, logprobs=2), replace(_RANDOM, frequency_penalty=0.5), _RANDOM),
    *(replace(_RANDOM, top_k=5), replace(_RANDOM, top_p=0.9), replace(_RANDOM, min_p=0.1)),
)
_DRAFTER = replace(_IN_TILES, hidden=384, heads=3, kv_heads=1, bias=False)
_READ = replace(_IN_TILES, layers=3)
"""A head reads the hidden states of three layers."""


class Way(StrEnum):
    """How an engine computes its steps."""

    EAGER = "eager"
    """Every kernel by itself."""
    GRAPHS = "graphs"
    """Small steps, of decodes, drafts and prompts, from graphs."""
    DETERMINISTIC = "deterministic"
    """The same with kernels that keep rows apart: decodes from graphs."""
    DRAFT_MODEL = "draft_model"
    """With a second model: decodes of both from graphs."""
    EAGLE3 = "eagle3"
    """With an EAGLE-3 head: decodes from graphs."""


class _Driver:
    """What Triton asks of a driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Variants:
    """Notes in which steps kernels ask for variants that they had not asked for."""

    def __init__(self) -> None:
        self.step = -1
        self.first_steps: dict[str, list[int]] = defaultdict(list)
        self._seen: set[tuple[str, str]] = set()

    def asked(self, *, key: str, fn: Any, **_: Any) -> bool:
        """Triton's `jit_cache_hook`; true so that nothing is compiled."""
        if (fn.name, key) not in self._seen:
            self._seen.add((fn.name, key))
            self.first_steps[fn.name].append(self.step)
        return True


class _Graphs:
    """A `GraphBackend` that does the work again."""

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        work()
        return work


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    """What computes."""

    runner: ModelRunner
    graphs: StepGraphs | None
    drafter: DraftModel | Eagle3Drafter | None
    arena: KvArena

    def kind_of(self, rows: tuple[Row, ...]) -> str:
        """What a step of `rows` is computed from, and of what it is made."""
        padding = None if self.graphs is None else self.graphs.padding_of(rows)
        if padding is None:
            return "eager"
        if padding.chunks:
            return "mixed" if padding.decodes else "prompts"
        return "drafts" if any(row.draft for row in rows) else "decodes"


def _engine(way: Way, directory: Path) -> _Engine:
    shape, kernels = _SHAPE, TritonKernels(multiprocessors=8)
    if way in (Way.EAGER, Way.GRAPHS, Way.DRAFT_MODEL):
        shape = _IN_TILES
    if way is Way.DETERMINISTIC:
        shape, kernels = _WIDE, InvariantTritonKernels()
    decoder = random_decoder(shape, kernels, _CPU, torch.float16, _LONGEST)
    other: Decoder | Eagle3Head | None = None
    if way is Way.DRAFT_MODEL:
        other = random_decoder(_DRAFTER, kernels, _CPU, torch.float16, _LONGEST)
    if way is Way.EAGLE3:
        decoder = random_decoder(_READ, kernels, _CPU, torch.float16, _LONGEST)
        path = make_eagle3_head(
            directory,
            target_hidden_size=_READ.hidden,
            hidden_size=_READ.hidden,
            draft_vocab_size=192,
        )
        other = load_eagle3(path, load_eagle3_spec(path, decoder.spec), decoder)
    arena = _arena(decoder, other, _LIMITS.num_blocks + SPARE_BLOCKS)
    drafter = _drafter(decoder, other, arena)
    graphs = None
    if way is not Way.EAGER:
        graphs = _graphs(decoder, arena, drafter)
    return _Engine(
        runner=ModelRunner(decoder, arena, graphs=graphs, drafter=drafter),
        graphs=graphs,
        drafter=drafter,
        arena=arena,
    )


def _arena(decoder: Decoder, other: Decoder | Eagle3Head | None, pages: int) -> KvArena:
    spec, reads = None, 0
    if isinstance(other, Eagle3Head):
        spec, reads = other.spec.layer, other.spec.layer.hidden_size
    elif other is not None:
        spec = other.spec
    layout = kv_layout(decoder.spec, torch.float16, _BLOCK_TOKENS, spec, drafter_reads=reads)
    return KvArena(layout, pages, memoryview(bytearray(layout.region_bytes(pages))))


def _drafter(
    decoder: Decoder, other: Decoder | Eagle3Head | None, arena: KvArena
) -> DraftModel | Eagle3Drafter | None:
    layers = decoder.spec.num_layers
    if isinstance(other, Eagle3Head):
        return Eagle3Drafter(other, arena, num_model_layers=layers, eos_token_ids=())
    if other is None:
        return None
    own = DrafterPages(
        arena,
        first_layer=layers,
        num_layers=other.spec.num_layers,
        kv_heads=other.spec.num_kv_heads,
        head_dim=other.spec.head_dim,
    )
    graphs = _graphs(other, arena, None, own)
    return DraftModel(other, arena, own, eos_token_ids=(), graphs=graphs)


def _graphs(
    decoder: Decoder,
    arena: KvArena,
    drafter: DraftModel | Eagle3Drafter | None,
    pages: DrafterPages | None = None,
) -> StepGraphs:
    return StepGraphs(
        decoder,
        arena,
        most_rows=_MOST_ROWS,
        most_chunk_tokens=SMALL_PROMPTS if drafter is None and pages is None else 0,
        table_width=_LIMITS.num_blocks_for(_LONGEST),
        backend=_Graphs(),
        pages=pages,
        observer=None if drafter is None else drafter.observer,
    )


@contextmanager
def _without_gpu() -> Iterator[None]:
    """What stands for a GPU: kernels leave zeros, and random draws are Triton's."""

    def draw(scores: torch.Tensor, highest: torch.Tensor, rows: RandomRows) -> torch.Tensor:
        return draw_with_triton(scores, highest, rows)

    with ExitStack() as patches:
        patches.enter_context(patch.object(torch, "empty", torch.zeros))
        patches.enter_context(patch.object(torch, "empty_like", torch.zeros_like))
        for module in ("runner", "draft_model", "eagle3_drafter"):
            patches.enter_context(patch(f"baton_engine.{module}.choose_draw", lambda device: draw))
        yield


class Replayed(TypedDict):
    """What steps asked for.

    Attributes:
        variants: Of each kernel, the steps in which variants were first asked for; -1 is before the first,
            when an engine warms up.
        kinds: How many steps there were of each kind.
    """

    variants: dict[str, list[int]]
    kinds: dict[str, int]


def replay(way: Way, steps: int) -> Replayed:
    """Random steps of an engine."""
    variants, numbers, kinds = Variants(), random.Random(0), Counter[str]()
    triton.knobs.runtime.jit_cache_hook = variants.asked
    with TemporaryDirectory() as directory, _without_gpu():
        engine = _engine(way, Path(directory))
        warm_up(engine.runner, limits=_LIMITS, drafter=engine.drafter, page_kernels=None)
        PageSums([engine.arena.page_bytes(0)]).of_layer(0, [0])
        for variants.step in range(steps):
            rows = _rows(numbers)
            drafts = _drafts(numbers, rows)
            if engine.drafter is not None and drafts.rows:
                engine.drafter.draft(drafts)
            kinds[engine.kind_of(rows)] += 1
            engine.runner.execute(StepPlan(step=variants.step, rows=rows))
            _draw(numbers, len(rows))
            _sum(numbers, engine.arena)
    return Replayed(variants=variants.first_steps, kinds=kinds)


def _rows(numbers: random.Random) -> tuple[Row, ...]:
    """Decodes with and without drafts, chunks, or both, of any length, as schedulers mix them."""
    kinds = numbers.choice(((0, 1), (1, 0), (1, 1)))
    decodes = numbers.randint(1, _MOST_ROWS - MOST_CHUNKS - 1) * kinds[0]
    chunks = numbers.randint(1, MOST_CHUNKS + 1) * kinds[1]
    width = _LIMITS.num_blocks_for(_LONGEST)
    free = list(range(_LIMITS.num_blocks))
    numbers.shuffle(free)
    texts = [
        _text(numbers, number, free[number * width : (number + 1) * width])
        for number in range(decodes + chunks)
    ]
    rows, drafts, most_drafts = [], [], numbers.choice((0, _MOST_DRAFTS))
    for text in texts[:decodes]:
        text.state, text.num_computed = State.RUNNING, len(text.tokens) - 1
        rows.append(Row(seq=text, start=text.num_computed, num_tokens=1, samples=(0,)))
        drafts += draft_rows(text, [1] * numbers.choice((0, numbers.randint(0, most_drafts))))
    longest = numbers.choice((1, 10, 40, _LONGEST))
    return (*rows, *drafts, *(_chunk(numbers, text, longest) for text in texts[decodes:]))


def _text(numbers: random.Random, number: int, pages: list[int]) -> Sequence:
    params = numbers.choice(_PARAMS)
    tokens = (1,) * numbers.randint(2, _LONGEST - _MOST_DRAFTS)
    prompt = Prompt(prompt_tokens=tokens, sampling=params)
    text = Request(asked=Generate(seq_id=SeqId(str(number)), prompt=prompt)).first_sequence()
    text.blocks += [BlockId(page) for page in pages]
    return text


def _chunk(numbers: random.Random, text: Sequence, longest: int) -> Row:
    """Some of a prompt's tokens: up to its end, where it draws, or not so far."""
    text.state = State.PREFILLING
    length = len(text.tokens)
    count = numbers.randint(1, min(longest, length))
    start = numbers.choice((length - count, numbers.randint(0, length - count)))
    text.num_computed = start
    text.num_drafted = numbers.randint(0, start)
    ends, is_scored = start + count == length, numbers.random() < 0.1
    return Row(
        seq=text,
        start=start,
        num_tokens=count,
        samples=tuple(range(numbers.randint(1, 3))) if ends else (),
        num_scored=numbers.randint(0, count - ends) if is_scored else 0,
    )


def _drafts(numbers: random.Random, rows: tuple[Row, ...]) -> DraftPlan:
    """Of the texts that decode; of some there is more to compute than the last token."""
    wanted = []
    for row in rows:
        if row.seq.state is State.RUNNING and not row.draft:
            end = len(row.seq.tokens)
            count = numbers.randint(1, min(end - SHIFT, numbers.choice((1, 2, 40))))
            wanted.append(
                DraftRow(
                    seq=row.seq,
                    start=end - count,
                    num_tokens=count,
                    count=numbers.randint(0, _MOST_DRAFTS),
                )
            )
    return DraftPlan(rows=tuple(wanted))


def _draw(numbers: random.Random, rows: int) -> None:
    drawn = numbers.randint(1, rows)
    samples, filtering = numbers.randint(1, 5), numbers.randint(0, drawn)
    filters = (
        torch.zeros(filtering, dtype=torch.int64),
        torch.ones(filtering, dtype=torch.float64),
        torch.zeros(filtering),
    )
    random_draw(
        torch.zeros(rows, _SHAPE.vocab),
        torch.zeros(rows, 1),
        torch.zeros(drawn, dtype=torch.int64),
        torch.ones(drawn),
        torch.zeros(drawn, samples, dtype=torch.float64),
        filters if filtering else None,
        with_top_k=numbers.random() < 0.5,
        with_top_p=numbers.random() < 0.5,
    )


def _sum(numbers: random.Random, arena: KvArena) -> None:
    pages = arena.page_bytes(0)
    begin = 8 * numbers.randrange(pages.shape[1] // 16)
    chosen = torch.zeros(numbers.randint(1, 40), dtype=torch.int64)
    sum_pages(pages, chosen, begin // 8)


def main() -> None:
    """Replays as many random steps as are asked for, in each way that is."""
    triton.runtime.driver.set_active(_Driver())
    steps = int(sys.argv[1])
    json.dump({way: replay(Way(way), steps) for way in sys.argv[2:]}, sys.stdout)


if __name__ == "__main__":
    main()
