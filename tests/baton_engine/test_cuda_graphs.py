"""Decode steps over buckets of rows, with a backend that repeats work by doing it again."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import EngineError
from baton.generation import Prompt, SamplingParams
from baton.ids import BlockId, SeqId
from baton.layout import KvLayout
from baton_engine.cache.arena import KvArena
from baton_engine.cuda_graphs import Scored, StepGraphs, bucket_sizes, mixed_sizes
from baton_engine.kernels.ports import PagedBatch
from baton_engine.kernels.reference import ReferenceKernels
from baton_engine.kernels.splits import SplitRule
from baton_engine.messages import Generate
from baton_engine.models.config import kv_layout, load_spec
from baton_engine.models.decoder import Decoder
from baton_engine.models.inputs import InputBuilder, Unseen
from baton_engine.models.loader import load_decoder
from baton_engine.ports import PageExport
from baton_engine.runner import ModelRunner
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.scheduling.plan import Row, StepPlan
from baton_engine.scheduling.scheduler import Scheduler
from baton_engine.staging import DeviceStaging, PinnedBuffers
from tests.baton_engine.looped import draw_all
from tests.baton_engine.sequences import sequence
from tests.baton_engine.stepping import Text, make_runner, make_texts, run_all
from tests.baton_engine.tiny_models import make_model, random_prompts

T = TypeVar("T")
CPU = torch.device("cpu")
PARAMS = SamplingParams(temperature=0, max_tokens=6)


class EagerGraphs:
    """A `GraphBackend` that does the work again; counts."""

    def __init__(self) -> None:
        self.captured = 0
        self.repeated = 0

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        work()
        self.captured += 1

        def repeat() -> T:
            self.repeated += 1
            return work()

        return repeat


class StaticGraphs(EagerGraphs):
    """Puts what it computes where the last repetition put it, as graphs do."""

    def capture(self, work: Callable[[], Scored]) -> Callable[[], Scored]:  # type: ignore[override]
        self.captured += 1
        output = work()

        def repeat() -> Scored:
            self.repeated += 1
            anew = work()
            output.logits.copy_(anew.logits)
            output.greedy.copy_(anew.greedy)
            return output

        return repeat


class CuttingKernels(ReferenceKernels):
    """The twins, as if they cut contexts; sees to it that the pieces are those of the contexts."""

    RULE = SplitRule(spread=3)

    def split_rule(self, num_heads: int, pages: torch.Tensor) -> SplitRule:  # type: ignore[override]
        return self.RULE

    def paged_attention(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        window: int | None,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if batch.splits is not None:
            contexts = batch.context_lens[: batch.splits.num_decodes].numpy()
            row_of_piece, first_piece = self.RULE.cut(contexts)
            assert batch.splits.row_of_piece.tolist() == row_of_piece.tolist()
            assert batch.splits.first_piece.tolist() == first_piece.tolist()
        return super().paged_attention(query, pages, batch, scale, window, scales)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Decoder:
    path = make_model(tmp_path_factory.mktemp("model"), "mistral")
    return load_decoder(path, load_spec(path), torch.float32, CPU, kernels=CuttingKernels())


def graphed(
    decoder: Decoder,
    num_blocks: int,
    most_rows: int = 5,
    backend: EagerGraphs | None = None,
    *,
    most_chunk_tokens: int = 0,
) -> tuple[ModelRunner, KvArena, StepGraphs, EagerGraphs]:
    layout: KvLayout = kv_layout(decoder.spec, decoder.dtype, 16)
    memory = memoryview(bytearray(layout.region_bytes(num_blocks)))
    arena, backend = KvArena(layout, num_blocks, memory), backend or EagerGraphs()
    graphs = StepGraphs(
        decoder,
        arena,
        most_rows=most_rows,
        most_chunk_tokens=most_chunk_tokens,
        table_width=20,
        backend=backend,
    )
    return ModelRunner(decoder, arena, graphs=graphs), arena, graphs, backend


def texts_of(num_texts: int, params: SamplingParams = PARAMS) -> tuple[list[Text], int]:
    return make_texts(
        random_prompts(num_texts, 90, seed=2), params, block_tokens=16, chunks=(64, 200)
    )


@given(most=st.integers(1, 2000))
def test_there_is_a_bucket_for_every_number_of_rows_and_none_too_many(most):
    sizes = bucket_sizes(most)
    assert sizes[-1] == most
    assert all(smaller < larger for smaller, larger in pairwise(sizes))
    assert all(larger <= max(2 * smaller, smaller + 32) for smaller, larger in pairwise(sizes))


@pytest.mark.parametrize(
    "params",
    [PARAMS, replace(PARAMS, temperature=0.8, seed=3, top_p=0.9), replace(PARAMS, logprobs=2)],
    ids=["greedy", "random", "logprobs"],
)
def test_steps_from_graphs_draw_what_steps_without_them_draw(decoder, params):
    plain, num_blocks = texts_of(7, params)
    run_all(make_runner(decoder, block_tokens=16, num_blocks=num_blocks)[0], plain)
    repeated, _ = texts_of(7, params)
    runner, _, _, backend = graphed(decoder, num_blocks)
    run_all(runner, repeated)
    assert backend.repeated
    assert [t.seq.tokens for t in repeated] == [t.seq.tokens for t in plain]


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens come back as from a GPU: into memory of the host, behind the step that drew them."""
    memories: defaultdict[DeviceStaging, PinnedBuffers] = defaultdict(
        lambda: PinnedBuffers(pinned=False)
    )

    def copy_back(staging: DeviceStaging, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        host = memories[staging].room(tensor.nbytes).view(tensor.dtype).copy_(tensor)
        return lambda: host

    monkeypatch.setattr(DeviceStaging, "copy_back", copy_back)


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize(
    "params",
    [
        PARAMS,
        replace(PARAMS, temperature=0.8, seed=3, logprobs=1),
        replace(PARAMS, temperature=0.8, seed=3, frequency_penalty=0.7),
    ],
    ids=["greedy", "all", "counting tokens"],
)
def test_steps_launched_ahead_overwrite_nothing_that_is_still_needed(decoder, params):
    """The next step's inputs, logits and tokens go where those of a step lie that nobody has read yet."""
    asked = replace(params, max_tokens=30, stop_token_ids=tuple(range(0, 320, 11)))
    commands = [
        Generate(
            seq_id=SeqId(str(place)),
            prompt=Prompt(prompt_tokens=tuple(tokens), samples=(0,), sampling=asked),
        )
        for place, tokens in enumerate(random_prompts(5, 60, seed=4))
    ]
    drawn = {}
    for ahead in (False, True):
        runner, arena, _, backend = graphed(decoder, 60, backend=StaticGraphs())
        limits = EngineLimits(
            max_num_seqs=5,
            max_num_batched_tokens=64,
            max_model_len=320,
            block_tokens=16,
            num_blocks=60,
            vocab_size=decoder.spec.vocab_size,
        )
        scheduler = Scheduler(limits, layout=arena.layout, secret=bytes(32))
        drawn[ahead], num_ahead = draw_all(scheduler, runner, commands, ahead=ahead)
        assert backend.repeated
        assert (num_ahead > 5) == ahead
    assert drawn[True] == drawn[False]


def test_kernels_that_cut_no_contexts_are_repeated_too(tmp_path):
    path = make_model(tmp_path, "llama")
    model = load_decoder(path, load_spec(path), torch.float32, CPU, kernels=ReferenceKernels())
    plain, num_blocks = texts_of(3)
    run_all(make_runner(model, block_tokens=16, num_blocks=num_blocks)[0], plain)
    repeated, _ = texts_of(3)
    runner, _, _, backend = graphed(model, num_blocks)
    run_all(runner, repeated)
    assert backend.repeated
    assert [t.seq.tokens for t in repeated] == [t.seq.tokens for t in plain]


def test_the_likeliest_tokens_are_by_the_models_own_function(decoder):
    (text,), num_blocks = texts_of(1)
    chosen = replace(decoder, greedy=lambda logits: torch.full((logits.shape[0],), 7))
    _, _, graphs, _ = graphed(chosen, num_blocks)
    row = Row(seq=text.seq, start=0, num_tokens=1, samples=(0,))
    assert graphs.scores([row, row, row]).greedy.tolist() == [7, 7, 7]


def test_rows_that_fill_up_a_bucket_touch_no_page(decoder):
    (text,), _ = texts_of(1)
    _, arena, graphs, _ = graphed(decoder, num_blocks=9, most_rows=4)
    arena.layer(0).fill_(7.0)
    text.seq.blocks = [BlockId(3)]
    row = Row(seq=text.seq, start=0, num_tokens=1, samples=(0,))
    graphs.scores([row, row, row])
    untouched = [block for block in range(9) if block != 3]
    assert (arena.layer(0)[untouched] == 7.0).all()
    assert not (arena.layer(0)[3, :, :, 0] == 7.0).all()


def test_every_bucket_is_captured_once_at_start(decoder):
    *_, backend = graphed(decoder, num_blocks=2, most_rows=12)
    assert (backend.captured, backend.repeated) == (len(bucket_sizes(12)), 0)


def test_only_steps_of_nothing_but_decodes_are_taken(decoder):
    (text,), num_blocks = texts_of(1)
    _, _, graphs, _ = graphed(decoder, num_blocks)
    decode = Row(seq=text.seq, start=1, num_tokens=1, samples=(0,))
    chunk = Row(seq=text.seq, start=0, num_tokens=2, samples=(0,))
    silent = Row(seq=text.seq, start=1, num_tokens=1, samples=())
    scored = Row(seq=text.seq, start=1, num_tokens=1, samples=(0,), num_scored=1)
    export = PageExport(seq_id=text.seq.seq_id, first_block=0, blocks=(BlockId(0),))
    assert graphs.takes(StepPlan(step=0, rows=(decode, decode)))
    for rows in ((), (decode, chunk), (silent,), (scored,), (decode,) * 6):
        assert not graphs.takes(StepPlan(step=0, rows=rows))
    assert not graphs.takes(StepPlan(step=0, rows=(decode,), exports=(export,)))


def test_a_row_without_its_pages_is_refused_before_anything_is_computed(decoder):
    (text,), num_blocks = texts_of(1)
    runner, _, _, backend = graphed(decoder, num_blocks)
    text.seq.blocks = []
    row = Row(seq=text.seq, start=0, num_tokens=1, samples=(0,))
    with pytest.raises(EngineError, match="do not cover"):
        runner.execute(StepPlan(step=0, rows=(row,)))
    assert not backend.repeated


@given(most=st.integers(1, 2000), tokens=st.integers(1, 600))
def test_there_is_a_shape_for_every_small_step_with_prompts(most, tokens):
    shapes = mixed_sizes(most, tokens)
    assert {shape.decodes for shape in shapes} >= {0, most}
    for room in {shape.decodes for shape in shapes}:
        sizes = [shape.chunk_tokens for shape in shapes if shape.decodes == room]
        assert sizes[-1] >= tokens
        assert all(larger == 2 * smaller for smaller, larger in pairwise(sizes))
    assert mixed_sizes(most, 0) == ()


@pytest.mark.parametrize(
    "params",
    [PARAMS, replace(PARAMS, temperature=0.8, seed=3, top_p=0.9), replace(PARAMS, logprobs=2)],
    ids=["greedy", "random", "logprobs"],
)
def test_prompts_beside_decodes_from_graphs_draw_what_they_draw_without(decoder, params):
    def texts() -> tuple[list[Text], int]:
        prompts = random_prompts(7, 90, seed=2)
        return make_texts(prompts, params, block_tokens=16, chunks=(20, 3, 200))

    plain, num_blocks = texts()
    run_all(make_runner(decoder, block_tokens=16, num_blocks=num_blocks)[0], plain)
    repeated, _ = texts()
    backend = StaticGraphs()
    runner, _, graphs, _ = graphed(
        decoder, num_blocks, most_rows=8, backend=backend, most_chunk_tokens=64
    )
    taken: list[bool] = []
    scores = graphs.scores

    def count(rows: list[Row], unseen: Unseen | None = None) -> Scored:
        taken.append(any(row.num_tokens > 1 for row in rows))
        return scores(rows, unseen)

    graphs.scores = count  # type: ignore[method-assign,assignment]
    run_all(runner, repeated)
    assert True in taken
    assert [t.seq.tokens for t in repeated] == [t.seq.tokens for t in plain]


@settings(max_examples=15)
@given(data=st.data())
def test_steps_of_any_mixture_leave_the_pages_and_logits_that_they_leave_eagerly(decoder, data):
    """In turn from one set of graphs, so that a step finds what the one before it left in the tensors that stay."""
    runner_graphs, eager = (
        graphed(decoder, 60, most_rows=6, backend=StaticGraphs(), most_chunk_tokens=32)
        for _ in range(2)
    )
    _, arena, graphs, _ = runner_graphs
    builder = InputBuilder(16, 60, CPU, CuttingKernels.RULE)
    torch.manual_seed(data.draw(st.integers(0, 5)))
    for layer in range(len(decoder.layers)):
        arena.layer(layer).normal_()
        eager[1].layer(layer).copy_(arena.layer(layer))
    for _ in range(data.draw(st.integers(1, 4))):
        lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
        pages = data.draw(st.permutations(range(60)))
        rows = []
        for place, new in enumerate(sorted(lengths)):
            context = new + data.draw(st.integers(0, 40))
            held = sequence(range(3, 3 + context), PARAMS, seq_id=str(place))
            held.blocks = [BlockId(page) for page in pages[place * 4 : place * 4 + 4]]
            drawn = (0,) if new == 1 or data.draw(st.booleans()) else ()
            rows.append(Row(seq=held, start=context - new, num_tokens=new, samples=drawn))
        if not graphs.takes_rows(rows):
            assert sum(new > 1 for new in lengths) > 4 or sum(n for n in lengths if n > 1) > 32
            continue
        logits = graphs.scores(rows).logits
        wanted = decoder.forward(builder.build(rows), eager[1])
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
        for layer in range(len(decoder.layers)):
            torch.testing.assert_close(
                arena.layer(layer), eager[1].layer(layer), atol=1e-4, rtol=1e-4
            )


def test_steps_with_prompts_are_taken_while_they_are_small(decoder):
    (text,), num_blocks = texts_of(1)
    _, _, graphs, _ = graphed(decoder, num_blocks, most_chunk_tokens=32)
    decode = Row(seq=text.seq, start=40, num_tokens=1, samples=(0,))
    chunk = Row(seq=text.seq, start=0, num_tokens=10, samples=())
    scored = replace(chunk, num_scored=3)
    short = replace(chunk, num_tokens=2)
    for taken in ((chunk,), (decode, chunk), (decode,) * 5 + (chunk,) * 3, (short,) * 4):
        assert graphs.takes(StepPlan(step=0, rows=taken))
    too_large = (replace(chunk, num_tokens=33),)
    for left in ((decode,) * 6 + (chunk,), (chunk,) * 4, (short,) * 5, (scored,), too_large):
        assert not graphs.takes(StepPlan(step=0, rows=left))
