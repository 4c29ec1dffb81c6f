"""Tokens that a second model guesses change nothing but the number of steps, and its KV goes wherever the pages go."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.schema import EngineConfig, GrammarConfig, ModelConfig, SimulatedConfig
from baton.config.speculative import DraftModelSpeculation
from baton.errors import ConfigError, EngineError
from baton.generation import Prompt, SamplingParams, TokenSample
from baton.ids import SeqId
from baton.layout import KvLayout
from baton_engine.cache.arena import DrafterPages, KvArena
from baton_engine.cuda_graphs import StepGraphs
from baton_engine.draft_model import DraftModel
from baton_engine.grammar import load_compiler
from baton_engine.kernels.reference import ReferenceKernels
from baton_engine.messages import Abort, Generate, Prefill, Receive
from baton_engine.models.config import kv_layout, load_spec
from baton_engine.models.draft_spec import check_draft_length, load_draft_spec
from baton_engine.ports import LayerReady
from baton_engine.runner import ModelRunner
from baton_engine.scheduling.ordering import SchedulingPolicy
from baton_engine.scheduling.plan import DraftPlan
from baton_engine.scheduling.request import State
from baton_engine.simulated import build_simulated
from kv_transfer.memory.arena import WorkerMemory
from tests.baton_engine.built import built_engine
from tests.baton_engine.looped import draw_all
from tests.baton_engine.scheduling_world import World, hand_off, limits, prompt
from tests.baton_engine.test_beams import asked_of, assert_found
from tests.baton_engine.test_cuda_graphs import EagerGraphs
from tests.baton_engine.test_speculation import REQUESTS, asked, by_sample
from tests.baton_engine.tiny_models import make_model
from tests.baton_engine.whole_engine import WholeEngine
from tests.baton_engine.whole_engine import hand_off as hand_off_pages

ONE, TWO = SeqId("one"), SeqId("two")
OTHER_TEXT = tuple(30 + i * i % 11 for i in range(33))
DRAFTS = DraftModelSpeculation(num_speculative_tokens=3, model="")


def some(**changes: int):
    return limits(**({"vocab_size": 50} | changes))


def test_a_drafter_that_equals_the_model_is_always_right():
    world = World(some(), speculation=DRAFTS)
    world.tell(Generate(seq_id=ONE, prompt=prompt(6, max_tokens=30)))
    world.run()
    assert world.tokens("one") == world.undisturbed(prompt(6, max_tokens=30))
    world.assert_empty()
    counts = world.scheduler.speculation_counts
    assert counts is not None
    assert counts.accepted_tokens == counts.draft_tokens > 15
    assert len(world.plans) == 1 + 8  # the first token, 4 a step, and the last one


ASKED = st.builds(
    prompt,
    st.lists(st.integers(0, 3), min_size=1, max_size=14).map(tuple),
    samples=st.integers(1, 3),
    max_tokens=st.sampled_from([1, 5, 20]),
)


@settings(max_examples=150, deadline=None)
@given(
    asked=st.lists(st.tuples(ASKED, st.integers(0, 6)), min_size=1, max_size=6),
    block_tokens=st.sampled_from([1, 2, 4]),
    pages_tokens=st.integers(40, 90),
    budget=st.integers(3, 24),
    caching=st.booleans(),
    ends=st.booleans(),
    num_drafts=st.integers(1, 6),
    wrongly=st.sampled_from([0, 1, 2, 3, 7]),
    aborted=st.integers(0, 12),
)
def test_any_schedule_draws_what_a_text_alone_draws_without_a_drafter(
    asked, block_tokens, pages_tokens, budget, caching, ends, num_drafts, wrongly, aborted
):
    """The drafter reads its pages too: a copy,
    a page found or a place behind the text that it has not written is told.
    """
    world = World(
        some(
            vocab_size=4,
            block_tokens=block_tokens,
            num_blocks=-(-pages_tokens // block_tokens),
            max_num_batched_tokens=budget,
        ),
        eos_ids=(3,) if ends else (),
        enable_prefix_caching=caching,
        speculation=replace(DRAFTS, num_speculative_tokens=num_drafts),
        drafts_wrongly=wrongly,
    )
    prompts = {SeqId(f"s{i}"): one for i, (one, _) in enumerate(asked)}
    for (seq_id, one), (_, steps) in zip(prompts.items(), asked, strict=True):
        world.tell(Generate(seq_id=seq_id, prompt=one))
        for _ in range(steps):
            world.step()
    gone = SeqId(f"s{aborted}")
    world.tell(Abort(seq_id=gone))
    world.run()
    world.assert_empty()
    for seq_id, one in prompts.items():
        for sample in one.samples:
            wanted = world.undisturbed(one, sample)
            got = world.tokens(seq_id, sample)
            assert got == (wanted[: len(got)] if seq_id == gone else wanted)


def test_a_drafter_goes_on_with_the_pages_that_a_prefill_worker_sent():
    world = World(some(), speculation=DRAFTS)
    source, target = (World(some(), speculation=DRAFTS) for _ in range(2))
    text = prompt(11, max_tokens=20)
    source.tell(Prefill(seq_id=ONE, prompt=text))
    source.run()
    target.tell(Receive(seq_id=ONE, prompt=text))
    target.run()
    for export in source.exports(ONE):
        (reserved,) = [e for e in target.events if type(e).__name__ == "Reserved"]
        for index, page in enumerate(export.blocks, start=export.first_block):
            into = reserved.blocks[index]  # type: ignore[union-attr]
            target.runner.drafter_pages[into] = list(source.runner.drafter_pages[page])
    hand_off(source, target, ONE)
    target.run()
    assert target.tokens("one") == world.undisturbed(text)
    assert target.draft_plans[0].rows[0].start == 11


def test_where_drafts_are_always_wrong_the_drafter_follows_by_whole_pages():
    world = World(some(max_model_len=400, num_blocks=200), speculation=DRAFTS, drafts_wrongly=1)
    text = prompt(6, max_tokens=120)
    world.tell(Generate(seq_id=ONE, prompt=text))
    while not world.tokens("one"):
        world.step()
    (sequence,) = world.scheduler._queues.running
    while sequence.state is State.RUNNING:
        assert sequence.num_computed - sequence.num_drafted <= 68
        assert sequence.num_published <= sequence.num_drafted // 4
        world.step()
    drafting = [row.count > 0 for plan in world.draft_plans for row in plan.rows]
    assert sum(drafting) < 20, "they are made all the same"
    assert drafting.count(False) <= 120 // 64 + 1
    world.tell(Generate(seq_id=TWO, prompt=prompt((*range(6), *world.tokens("one"), 7))))
    world.run()
    assert 124 - 64 <= world.cached_tokens("two") <= 124  # of 125 computed tokens


def test_without_prefix_caching_no_text_leaves_the_drafter_far_behind():
    """Its next draft would compute all that is missing in one pass."""
    world = World(
        some(max_model_len=400, num_blocks=600),
        speculation=DRAFTS,
        drafts_wrongly=1,
        enable_prefix_caching=False,
    )
    for index in range(4):
        text = prompt((index, 1, 2, 3, 4, 5), max_tokens=160)
        world.tell(Generate(seq_id=SeqId(f"s{index}"), prompt=text))
    for _ in range(150):
        world.step()
    assert len(world.scheduler._queues.running) == 4
    rows = [row for plan in world.draft_plans for row in plan.rows]
    assert max(row.num_tokens for row in rows) <= 68
    assert any(row.count and row.start > 60 for row in rows), "it is asked again"
    world.run()


def test_beams_are_searched_for_without_the_drafter():
    """Their pages are shared before it could have come so far."""
    world = World(some(max_model_len=400, num_blocks=400), speculation=DRAFTS)
    text = asked_of(world, 7, max_tokens=100)
    world.tell(Generate(seq_id=ONE, prompt=text))
    world.run()
    assert_found(world, ONE, text)
    assert not world.draft_plans
    world.assert_empty()


def test_a_sequence_that_cannot_get_pages_for_drafts_goes_on_without():
    world = World(
        some(block_tokens=1, num_blocks=30, max_model_len=30, max_num_seqs=2),
        speculation=DRAFTS,
        enable_prefix_caching=False,
    )
    for name in ("one", "two"):
        world.tell(Generate(seq_id=SeqId(name), prompt=prompt(4, max_tokens=11)))
    world.run()
    world.assert_empty()
    assert world.scheduler.load().preemptions == 0, "drafts took pages that a text needed"
    assert world.tokens("one") == world.tokens("two") == world.undisturbed(prompt(4, max_tokens=11))


def test_drafts_that_a_step_goes_without_are_none_of_a_later_one():
    """A preemption, decided once they are there, has a prompt computed in a bounded time, and it has all of that."""
    world = World(
        some(vocab_size=4, block_tokens=2, num_blocks=10, max_num_seqs=3),
        speculation=DRAFTS,
        policy=SchedulingPolicy(tbt_s=10.0),
        drafts_wrongly=2,
    )
    texts = {
        SeqId(f"s{n}"): prompt(tuple((n + i) % 4 for i in range(5)), max_tokens=14 - n)
        for n in range(3)
    }
    world.tell(*(Generate(seq_id=seq_id, prompt=text) for seq_id, text in texts.items()))
    num_passed_by = 0
    while world.scheduler.load().running + world.scheduler.load().waiting:
        num_plans = len(world.draft_plans)
        world.step()
        asked_of = {row.seq for plan in world.draft_plans[num_plans:] for row in plan.rows}
        for sequence in world.scheduler._queues.running:
            if sequence.drafts is not None and sequence.drafts.proposed:
                num_passed_by += 1
                assert sequence in asked_of
    assert num_passed_by > 0
    for seq_id, text in texts.items():
        assert world.tokens(seq_id) == world.undisturbed(text)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", num_layers=1)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A drafter of three layers, two of which fit into one of the model's."""
    return make_model(
        tmp_path_factory.mktemp("small"),
        "qwen3",
        seed=1,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        hidden_size=32,
    )


@pytest.fixture(scope="module")
def compiler(model):
    spec = load_spec(model)
    compiler = load_compiler(
        model, GrammarConfig(), vocab_size=spec.vocab_size, eos_ids=spec.eos_token_ids
    )
    assert compiler is not None
    yield compiler
    compiler.close()


def by(drafter: Path, count: int = 3) -> DraftModelSpeculation:
    return DraftModelSpeculation(num_speculative_tokens=count, model=str(drafter))


def drawn(engine: WholeEngine, name: str) -> list[dict[int, list[TokenSample]]]:
    engine.tell(
        Generate(seq_id=ONE, prompt=asked(name)),
        Generate(seq_id=TWO, prompt=asked(name, OTHER_TEXT, samples=1)),
    )
    engine.run()
    assert engine.scheduler.load().blocks_used == 0
    return [by_sample(engine.tokens(ONE)), by_sample(engine.tokens(TWO))]


@pytest.mark.parametrize("name", REQUESTS)
def test_a_model_draws_the_same_bits_with_a_drafter_and_without(model, small, compiler, name):
    plain = drawn(WholeEngine(model, grammars=compiler), name)
    for drafter in (small, model):
        engine = WholeEngine(model, grammars=compiler, speculation=by(drafter))
        assert drawn(engine, name) == plain
        counts = engine.scheduler.speculation_counts
        assert counts is not None
        assert counts.draft_tokens > 4
        if drafter is model:
            assert counts.accepted_tokens == counts.draft_tokens, (
                "it draws otherwise than the model"
            )


@pytest.mark.parametrize("name", ["penalties", "grammar"])
def test_a_pair_with_a_drafter_draws_what_one_worker_draws_without(model, compiler, name):
    alone = WholeEngine(model, grammars=compiler)
    alone.tell(Generate(seq_id=ONE, prompt=asked(name)))
    alone.run()
    source, target = (
        WholeEngine(model, grammars=compiler, speculation=by(model)) for _ in range(2)
    )
    source.tell(Prefill(seq_id=ONE, prompt=asked(name)))
    source.run()
    (held,) = [s.blocks for r in source.scheduler._requests.values() for s in r.sequences]
    target.tell(Receive(seq_id=ONE, prompt=asked(name)))
    target.run()
    hand_off_pages(source, target, ONE, [*held])
    target.run()
    first, rest = by_sample(source.tokens(ONE)), by_sample(target.tokens(ONE))
    joined = {sample: tokens + rest.get(sample, []) for sample, tokens in first.items()}
    assert joined == by_sample(alone.tokens(ONE))
    counts = target.scheduler.speculation_counts
    assert counts is not None
    assert counts.accepted_tokens == counts.draft_tokens > 2, "its KV of the prompt did not come"


def test_a_text_that_goes_on_elsewhere_or_after_a_preemption_is_the_same(model, small):
    whole = drawn(WholeEngine(model), "sampled")
    texts = {
        (seq_id, sample): [token.token for token in tokens]
        for seq_id, samples in zip((ONE, TWO), whole, strict=True)
        for sample, tokens in samples.items()
    }
    pages = WholeEngine(model, speculation=by(small), num_blocks=9)
    assert drawn(pages, "sampled") == whole
    assert pages.scheduler.load().preemptions > 0
    resumed = WholeEngine(model, speculation=by(small))
    begun = replace(
        asked("sampled", OTHER_TEXT, samples=1), output_tokens=tuple(texts[TWO, 0][:13])
    )
    resumed.tell(Generate(seq_id=TWO, prompt=begun))
    resumed.run()
    assert [token.token for token in resumed.tokens(TWO)] == texts[TWO, 0][13:]


@pytest.mark.parametrize("name", ["logprobs", "grammar"])
def test_looking_ahead_and_a_drafter_go_together(model, small, compiler, name):
    commands = [
        Generate(seq_id=ONE, prompt=asked(name)),
        Generate(seq_id=TWO, prompt=asked(name, OTHER_TEXT)),
    ]
    told = []
    for speculation, ahead in ((None, False), (by(small), True)):
        engine = WholeEngine(model, grammars=compiler, speculation=speculation)
        tokens, _ = draw_all(
            engine.scheduler,
            engine.runner,
            commands,
            ahead=ahead,
            grammars=compiler,
            drafter=engine.drafter,
        )
        told.append(tokens)
    assert told[0] == told[1]


class Broken:
    """A `Drafter` that computes nothing every second time."""

    def __init__(self, drafter: DraftModel) -> None:
        self._drafter = drafter
        self.num_broken = self.num_asked = 0

    def draft(self, plan: DraftPlan) -> Sequence[Sequence[int]]:
        self.num_asked += 1
        if self.num_asked % 2:
            return self._drafter.draft(plan)
        self.num_broken += 1
        raise EngineError("out of memory")


def test_a_drafter_that_fails_fails_nothing_else(model, small, caplog):
    plain = WholeEngine(model)
    wanted, _ = draw_all(
        plain.scheduler, plain.runner, [Generate(seq_id=ONE, prompt=asked("sampled"))], ahead=False
    )
    engine = WholeEngine(model, speculation=by(small))
    assert isinstance(engine.drafter, DraftModel)
    broken = Broken(engine.drafter)
    found, _ = draw_all(
        engine.scheduler,
        engine.runner,
        [Generate(seq_id=ONE, prompt=asked("sampled"))],
        ahead=False,
        drafter=broken,
    )
    assert found == wanted
    assert broken.num_broken > 1
    assert "the draft model failed" in caplog.text


def test_drafts_can_be_repeated_from_graphs(model):
    """Of kernels that take rows of padding, as those of a GPU do."""
    kernels = ReferenceKernels()
    plain = drawn(WholeEngine(model, kernels=kernels), "sampled")
    eager = WholeEngine(model, kernels=kernels, speculation=by(model))
    drafter = eager.drafter
    assert isinstance(drafter, DraftModel)
    backend = EagerGraphs()
    drafter._graphs = StepGraphs(
        drafter._model,
        eager.arena,
        most_rows=8,
        table_width=32,
        backend=backend,
        pages=drafter._pages,
    )
    assert drawn(eager, "sampled") == plain
    assert backend.repeated > 3


@pytest.mark.parametrize("num_cached", [0, 48])
def test_a_last_token_of_a_prompt_that_a_graph_computes_is_the_drafters_too(model, num_cached):
    """It is one row of one token, as those of decodes are."""
    engine = WholeEngine(model, kernels=ReferenceKernels(), speculation=by(model))
    assert isinstance(engine.drafter, DraftModel)
    target, backend = engine.drafter._model, EagerGraphs()
    graphs = StepGraphs(
        target, engine.arena, most_rows=8, table_width=32, backend=backend, most_chunk_tokens=0
    )
    engine.runner = ModelRunner(
        target, engine.arena, graphs=graphs, drafter=engine.drafter, one_by_one=True
    )
    for index in range(len(engine.arena.layout.layers)):
        engine.arena.layer(index).normal_()  # what others left
    text = tuple(30 + i * i % 11 for i in range(num_cached + 1))
    params = SamplingParams(temperature=0, max_tokens=40)
    if num_cached:
        engine.tell(Generate(seq_id=ONE, prompt=Prompt(prompt_tokens=text, sampling=params)))
        engine.run()
    counts = engine.scheduler.speculation_counts
    assert counts is not None
    begun = counts.draft_tokens
    engine.tell(Generate(seq_id=TWO, prompt=Prompt(prompt_tokens=text, sampling=params)))
    before = backend.repeated
    engine.step()
    assert backend.repeated == before + 1
    engine.run()
    assert counts.accepted_tokens == counts.draft_tokens > begun


def layout_with(model: Path, drafter: Path | None) -> KvLayout:
    spec = None if drafter is None else load_spec(drafter)
    return kv_layout(load_spec(model), torch.float32, 16, spec)


def test_the_layout_names_the_drafter_and_its_layers(model, small):
    plain, with_drafter = layout_with(model, None), layout_with(model, small)
    assert with_drafter.layers == (*plain.layers, "draft.layers.0", "draft.layers.1")
    assert with_drafter.drafter == load_spec(small).fingerprint
    told = plain.difference(with_drafter)
    assert told == f"drafter: '' here, {with_drafter.drafter!r} there"
    assert plain.content_digest() != with_drafter.content_digest()


def test_layers_of_a_drafter_lie_side_by_side_in_the_arenas_pages(model, small):
    layout, blocks = layout_with(model, small), 5
    arena = KvArena(layout, blocks, memoryview(bytearray(layout.region_bytes(blocks))))
    spec = load_spec(small)
    pages = DrafterPages(
        arena, first_layer=1, num_layers=3, kv_heads=spec.num_kv_heads, head_dim=spec.head_dim
    )
    assert pages.stride == 2
    for index in range(3):
        for block in range(blocks):
            pages.layer(index)[pages.stride * block].add_(1 + 10 * index + block)
    halves = arena.layer(1).view(blocks, 2, -1)
    assert [[set(half.tolist()) for half in page] for page in halves] == [
        [{1.0 + block}, {11.0 + block}] for block in range(blocks)
    ]
    last = arena.layer(2).view(blocks, 2, -1)
    assert [[set(half.tolist()) for half in page] for page in last] == [
        [{21.0 + block}, {0.0}] for block in range(blocks)
    ]
    assert not arena.layer(0).any()


class Sink:
    """A `LayerSink` that notes."""

    def __init__(self) -> None:
        self.layers: list[tuple[int, list[float]]] = []
        self.arena: KvArena | None = None

    def save_kv_layer(self, layer: LayerReady) -> None:
        assert self.arena is not None
        (export,) = layer.exports
        pages = self.arena.layer(layer.layer_index)[list(export.blocks)]
        self.layers.append((layer.layer_index, pages.flatten().tolist()))


def test_the_drafters_layers_leave_a_prefill_worker_as_the_models_do(model, small):
    sink = Sink()
    engine = WholeEngine(model, speculation=by(small))
    sink.arena = engine.arena
    assert engine.drafter is not None
    engine.runner = ModelRunner(
        engine.runner._model, engine.arena, sink, drafter=engine.drafter, one_by_one=True
    )
    engine.tell(Prefill(seq_id=ONE, prompt=asked("greedy", samples=1)))
    engine.run()
    assert [index for index, _ in sink.layers] == [0, 1, 2]
    (held,) = [s.blocks for r in engine.scheduler._requests.values() for s in r.sequences]
    for index, pages in sink.layers:
        assert pages == engine.arena.layer(index)[list(held)].flatten().tolist(), "told too early"
        assert any(pages)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"vocab_size": 330}, "a vocabulary of 330 tokens, the model one of 320"),
        ({"num_kv_heads": 4}, "is no whole fraction of the model's, 2 heads of 16"),
        ({"num_kv_heads": 1, "head_dim": 24}, "1 heads of 24, is no whole fraction"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_by_its_field(tmp_path, model, changes, why):
    drafter = make_model(tmp_path / "drafter", "llama", num_layers=1, **changes)
    with pytest.raises(ConfigError, match=r"^engine\.speculative_config\.model: ") as refused:
        load_draft_spec(by(drafter), load_spec(model), model)
    assert why in str(refused.value)
    assert refused.value.param == "engine.speculative_config.model"


def test_a_drafter_of_other_tokens_or_shorter_texts_or_none_is_refused(tmp_path, model):
    drafter = make_model(tmp_path / "drafter", "llama", num_layers=1, max_position=64)
    spec = load_spec(model)
    _, small = load_draft_spec(by(drafter), spec, model)
    with pytest.raises(ConfigError, match="was made for 64 tokens, and texts may have 65"):
        check_draft_length(small, 65)
    check_draft_length(small, 64)
    tokenizer = drafter / "tokenizer.json"
    said = tokenizer.read_text()
    tokenizer.write_text(said.replace('"vocab": {', '"vocab": {"another token": 319, ', 1))
    with pytest.raises(ConfigError, match="has another tokenizer than the model"):
        load_draft_spec(by(drafter), spec, model)
    with pytest.raises(ConfigError, match=r"speculative_config\.model: .*does not exist"):
        load_draft_spec(by(tmp_path / "nowhere"), spec, model)


def test_an_engine_is_built_with_its_drafter(model, small):
    config = EngineConfig(
        kv_cache_memory_bytes=8 << 20,
        device="cpu",
        speculative_config={
            "method": "draft_model",
            "model": str(small),
            "num_speculative_tokens": 2,
        },
    )
    built = built_engine(model, config)
    try:
        assert built.layout.drafter == load_spec(small).fingerprint
        assert built.speculation_counts is not None
    finally:
        built.host.close()
    with pytest.raises(ConfigError, match="was made for 2048 tokens, and texts may have 4096"):
        built_engine(_longer(model), config, max_model_len=4096)


def test_an_engine_with_a_drafter_of_another_vocabulary_does_not_start(tmp_path, model):
    drafter = make_model(tmp_path / "drafter", "llama", num_layers=1, vocab_size=330)
    asked = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 2}
    config = EngineConfig(kv_cache_memory_bytes=8 << 20, device="cpu", speculative_config=asked)
    with pytest.raises(ConfigError, match="a vocabulary of 330 tokens") as refused:
        built_engine(model, config)
    assert refused.value.param == "engine.speculative_config.model"


def _longer(model: Path) -> Path:
    """The same, made for longer texts."""
    return make_model(model.parent / "longer", "llama", num_layers=1, max_position=4096)


def test_a_simulated_worker_refuses_a_drafter():
    config = EngineConfig(
        speculative_config={"method": "draft_model", "model": "x", "num_speculative_tokens": 2}
    )
    with pytest.raises(ConfigError, match=r"engine.speculative_config.method: a simulated worker"):
        build_simulated(
            ModelConfig(model="m"),
            config,
            SimulatedConfig(),
            secret=bytes(32),
            memory=WorkerMemory(),
            sink=None,
        )
