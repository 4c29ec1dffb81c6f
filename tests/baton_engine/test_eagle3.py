"""An EAGLE-3 head guesses what its formulas say, from pages that may have come from anywhere,
and changes nothing but the number of steps.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from baton.config.schema import EngineConfig
from baton.config.speculative import Eagle3Speculation
from baton.errors import ConfigError
from baton.generation import Prompt, SamplingParams, TokenSample
from baton.ids import SeqId
from baton_engine.cache.arena import HiddenPages, KvArena
from baton_engine.cuda_graphs import StepGraphs
from baton_engine.kernels.reference import ReferenceKernels
from baton_engine.messages import Abort, Generate, Prefill, Receive
from baton_engine.models.config import kv_layout, load_spec
from baton_engine.models.draft_spec import load_head_spec
from baton_engine.runner import ModelRunner
from tests.baton_engine.built import built_engine
from tests.baton_engine.scheduling_world import World, limits, prompt
from tests.baton_engine.test_cuda_graphs import EagerGraphs
from tests.baton_engine.test_draft_model import Sink
from tests.baton_engine.test_speculation import REQUESTS, asked, by_sample
from tests.baton_engine.tiny_models import make_eagle3_head, make_model
from tests.baton_engine.whole_engine import WholeEngine, hand_off

ONE, TWO = SeqId("one"), SeqId("two")
OTHER_TEXT = tuple(30 + i * i % 11 for i in range(33))
DRAFTS = Eagle3Speculation(num_speculative_tokens=3, model="")
ASKED = st.builds(
    prompt,
    st.lists(st.integers(0, 3), min_size=1, max_size=14).map(tuple),
    samples=st.integers(1, 3),
    max_tokens=st.sampled_from([1, 5, 20]),
)


def test_a_head_that_is_always_right_is_always_accepted():
    world = World(limits(vocab_size=50), speculation=DRAFTS)
    text = prompt(7, max_tokens=30)
    world.tell(Generate(seq_id=ONE, prompt=text))
    world.run()
    assert world.tokens("one") == world.undisturbed(text)
    world.assert_empty()
    counts = world.scheduler.speculation_counts
    assert counts is not None
    assert counts.accepted_tokens == counts.draft_tokens > 15


@settings(max_examples=150, deadline=None)
@given(
    asked=st.lists(st.tuples(ASKED, st.integers(0, 6)), min_size=1, max_size=6),
    block_tokens=st.sampled_from([1, 2, 4]),
    pages_tokens=st.integers(40, 90),
    budget=st.integers(3, 24),
    caching=st.booleans(),
    num_drafts=st.integers(1, 6),
    wrongly=st.sampled_from([0, 0, 1, 3]),
    aborted=st.integers(0, 12),
)
def test_any_schedule_draws_what_a_text_alone_draws_without_a_head(
    asked, block_tokens, pages_tokens, budget, caching, num_drafts, wrongly, aborted
):
    """The fake head reads what the model held at each place,
    and is right unless told otherwise or given a wrong place.
    """
    world = World(
        limits(
            vocab_size=50,
            block_tokens=block_tokens,
            num_blocks=-(-pages_tokens // block_tokens),
            max_num_batched_tokens=budget,
        ),
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
    counts = world.scheduler.speculation_counts
    assert counts is not None
    if not wrongly:
        assert counts.accepted_tokens == counts.draft_tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", num_layers=3)


@pytest.fixture(scope="module")
def head(tmp_path_factory) -> Path:
    return make_eagle3_head(tmp_path_factory.mktemp("head"))


def by(head: Path, count: int = 3) -> Eagle3Speculation:
    return Eagle3Speculation(num_speculative_tokens=count, model=str(head))


def by_formula(
    model: Path, head: Path, text: list[int], count: int, *, norm_first: bool
) -> list[int]:
    """What a head guesses greedily behind `text`, computed from scratch over the whole text:
    vLLM's formulas in plain torch.
    """
    weights = load_file(head / "model.safetensors")
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        states = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        fused = torch.cat([states[i][0] for i in (0, 1, 2)], -1) @ weights["fc.weight"].T
        embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
        drafts: list[int] = []
        while len(drafts) < count:
            tokens = torch.tensor([*text, *drafts][1:])
            final, summed = _layer(weights, embedding[tokens], fused, norm_first=norm_first)
            own = int((final[-1] @ weights["lm_head.weight"].T).argmax())
            drafts.append(own + int(weights["d2t"][own]))
            fused = torch.cat((fused, summed[-1:]))
    return drafts


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def _layer(
    weights: dict[str, torch.Tensor],
    embedded: torch.Tensor,
    hidden: torch.Tensor,
    *,
    norm_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    def of(name: str) -> torch.Tensor:
        return weights[f"midlayer.{name}.weight"]

    normed = _norm(hidden, of("hidden_norm"))
    residual = normed if norm_first else hidden
    x = torch.cat((_norm(embedded, of("input_layernorm")), normed), -1)
    count = len(x)
    query, key, value = (
        (x @ of(f"self_attn.{name}_proj").T).view(count, -1, 16).transpose(0, 1) for name in "qkv"
    )
    angles = torch.arange(count).float()[:, None] / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def turned(vectors: torch.Tensor) -> torch.Tensor:
        first, second = vectors.chunk(2, -1)
        return vectors * cos + torch.cat((-second, first), -1) * sin

    attended = functional.scaled_dot_product_attention(
        turned(query), turned(key).expand(4, -1, -1), value.expand(4, -1, -1), is_causal=True
    )
    residual = residual + attended.transpose(0, 1).flatten(1) @ of("self_attn.o_proj").T
    x = _norm(residual, of("post_attention_layernorm"))
    gated = functional.silu(x @ of("mlp.gate_proj").T) * (x @ of("mlp.up_proj").T)
    residual = residual + gated @ of("mlp.down_proj").T
    return _norm(residual, weights["norm.weight"]), residual


@pytest.mark.parametrize("kernels", [None, ReferenceKernels()])
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_head_guesses_what_its_formulas_say(tmp_path, model, kernels, norm_first):
    """Whatever the chunks of its prompt were, and whether the model is computed by whole layers or one by one."""
    head = make_eagle3_head(tmp_path / "head", norm_before_residual=norm_first)
    engine = WholeEngine(
        model, budget=24, kernels=kernels, speculation=by(head), deterministic=False
    )
    assert engine.drafter is not None
    text = Prompt(prompt_tokens=OTHER_TEXT, sampling=SamplingParams(temperature=0, max_tokens=40))
    engine.tell(Generate(seq_id=ONE, prompt=text))
    compared = 0
    while engine.scheduler.load().running or not compared:
        plan = engine.scheduler.plan_drafts(0.0)
        if plan is not None:
            drafts = engine.drafter.draft(plan)
            (row,) = plan.rows
            if row.count:
                tokens = row.seq.tokens
                wanted = by_formula(model, head, tokens, row.count, norm_first=norm_first)
                assert drafts == [wanted]
                compared += 1
            engine.scheduler.drafted(plan, drafts, 0.0)
        step, _events = engine.scheduler.schedule(0.0)
        if step is None:
            break
        engine.scheduler.update_from_output(step, engine.runner.execute(step), 0.0)
    assert compared >= 3


def drawn(engine: WholeEngine, name: str) -> list[dict[int, list[TokenSample]]]:
    engine.tell(
        Generate(seq_id=ONE, prompt=asked(name)),
        Generate(seq_id=TWO, prompt=asked(name, OTHER_TEXT, samples=1)),
    )
    engine.run()
    assert engine.scheduler.load().blocks_used == 0
    return [by_sample(engine.tokens(ONE)), by_sample(engine.tokens(TWO))]


@pytest.mark.parametrize("name", [name for name in REQUESTS if name != "grammar"])
def test_a_model_draws_the_same_bits_with_a_head_and_without(model, head, name):
    engine = WholeEngine(model, speculation=by(head))
    assert drawn(engine, name) == drawn(WholeEngine(model), name)
    counts = engine.scheduler.speculation_counts
    assert counts is not None
    assert counts.draft_tokens > 4


def test_a_head_whose_drafts_do_not_pay_follows_before_the_last_token_has_a_page(model, head):
    text = Prompt(
        prompt_tokens=OTHER_TEXT, sampling=SamplingParams(max_tokens=150, ignore_eos=True, seed=3)
    )
    engine, plain = WholeEngine(model, speculation=by(head)), WholeEngine(model)
    for each in (engine, plain):
        each.tell(Generate(seq_id=ONE, prompt=text))
        each.run()
    assert engine.tokens(ONE) == plain.tokens(ONE)


def test_a_head_goes_on_at_the_decode_worker_as_if_the_text_had_never_moved(model, head):
    text = asked("sampled", OTHER_TEXT, samples=1)
    alone = WholeEngine(model, speculation=by(head))
    alone.tell(Generate(seq_id=ONE, prompt=text))
    alone.run()
    source, target = (WholeEngine(model, speculation=by(head)) for _ in range(2))
    source.tell(Prefill(seq_id=ONE, prompt=text))
    source.run()
    (held,) = [s.blocks for r in source.scheduler._requests.values() for s in r.sequences]
    target.tell(Receive(seq_id=ONE, prompt=text))
    target.run()
    hand_off(source, target, ONE, [*held])
    target.run()
    assert source.tokens(ONE) + target.tokens(ONE) == alone.tokens(ONE)
    here, there = alone.scheduler.speculation_counts, target.scheduler.speculation_counts
    assert here is not None
    assert there is not None
    assert (there.draft_tokens, there.accepted_tokens) == (here.draft_tokens, here.accepted_tokens)


def test_a_text_that_goes_on_elsewhere_or_after_a_preemption_is_the_same(model, head):
    whole = drawn(WholeEngine(model), "sampled")
    pages = WholeEngine(model, speculation=by(head), num_blocks=9)
    assert drawn(pages, "sampled") == whole
    assert pages.scheduler.load().preemptions > 0
    texts = [token.token for token in whole[1][0]]
    resumed = WholeEngine(model, speculation=by(head))
    begun = replace(asked("sampled", OTHER_TEXT, samples=1), output_tokens=tuple(texts[:13]))
    resumed.tell(Generate(seq_id=TWO, prompt=begun))
    resumed.run()
    assert [token.token for token in resumed.tokens(TWO)] == texts[13:]


def test_graphs_of_the_model_keep_what_the_head_reads(model, head):
    """Of kernels that take rows of padding, as those of a GPU do; the last page is nobody's, which these write to."""
    kernels = ReferenceKernels()
    plain = drawn(WholeEngine(model, kernels=kernels), "sampled")
    engine, eager = (WholeEngine(model, kernels=kernels, speculation=by(head)) for _ in range(2))
    assert drawn(eager, "sampled") == plain
    assert engine.drafter is not None
    backend = EagerGraphs()
    engine.runner = ModelRunner(
        engine.runner._model,
        engine.arena,
        graphs=StepGraphs(
            engine.runner._model,
            engine.arena,
            most_rows=8,
            table_width=32,
            backend=backend,
            observer=engine.drafter.observer,
        ),
        drafter=engine.drafter,
        one_by_one=True,
    )
    assert drawn(engine, "sampled") == plain
    assert backend.repeated > 3
    one, other = engine.scheduler.speculation_counts, eager.scheduler.speculation_counts
    assert one is not None
    assert other is not None
    assert one.accepted_tokens == other.accepted_tokens


def test_what_a_head_reads_leaves_a_prefill_worker_with_its_kv(model, head):
    sink = Sink()
    engine = WholeEngine(model, speculation=by(head))
    sink.arena = engine.arena
    assert engine.arena.layout.layers[3:] == (
        "draft.layers.0",
        "draft.hidden.0",
    )
    engine.runner = ModelRunner(
        engine.runner._model, engine.arena, sink, drafter=engine.drafter, one_by_one=True
    )
    engine.tell(Prefill(seq_id=ONE, prompt=asked("greedy", samples=1)))
    engine.run()
    assert [index for index, _ in sink.layers] == [0, 1, 2, 3, 4]
    (held,) = [s.blocks for r in engine.scheduler._requests.values() for s in r.sequences]
    for index, pages in sink.layers:
        assert pages == engine.arena.layer(index)[list(held)].flatten().tolist(), "told too early"
        assert any(pages)


def test_vectors_lie_over_as_many_layers_as_they_take(model, head):
    layout = kv_layout(load_spec(model), torch.float32, 16, load_spec(model), drafter_reads=150)
    blocks = 4
    assert [name for name in layout.layers if "hidden" in name] == [
        f"draft.hidden.{i}" for i in range(3)
    ]
    arena = KvArena(layout, blocks, memoryview(bytearray(layout.region_bytes(blocks))))
    pages = HiddenPages(arena, first_layer=6, width=150)
    vectors = torch.randn(5, 150)
    slots = torch.tensor([0, 17, 16, -1, 40])
    pages.write(slots, vectors)
    kept = [0, 1, 2, 4]
    assert torch.equal(pages.read(slots[kept]), vectors[kept])
    assert not any(arena.layer(index).any() for index in range(6))


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, (0, 1, 2)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "eagle_config": None}, (0, 1, 2)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, (1, 3, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, (2, 4, 5)),
        ({"eagle_config": None}, (2, 4, 5)),
    ],
)
def test_the_layers_that_a_head_reads_are_named_where_vllm_looks_for_them(
    tmp_path, changes, layers
):
    target = load_spec(make_model(tmp_path / "model", "llama", num_layers=8))
    head = make_eagle3_head(tmp_path / "head", target_layers=(1, 3, 4), **changes)
    _, spec = load_head_spec(by(head), target)
    assert spec.target_layers == layers


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"norm_before_fc": True}, "norm_before_fc is True, but must be false"),
        ({"fc_norm": True}, "fc_norm is True, but must be false"),
        ({"norm_output": True}, "norm_output is True, but must be false"),
        ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc is True, but must be false"),
        ({"vocab_size": 330}, "a vocabulary of 330 tokens, the model one of 320"),
        ({"target_hidden_size": 32}, "target_hidden_size is 32, but must be 64"),
        ({"target_layers": (0, 1, 3)}, "three different layers of the model's 3, rising"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, but must be 1"),
        ({"num_key_value_heads": 4}, "is no whole fraction of the model's"),
        ({"architectures": ["LlamaForCausalLM"]}, "architecture LlamaForCausalLM is not supported"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_its_field(tmp_path, model, changes, why):
    head = make_eagle3_head(tmp_path / "head", **changes)
    with pytest.raises(ConfigError, match=r"^engine\.speculative_config\.model: ") as refused:
        load_head_spec(by(head), load_spec(model))
    assert why in str(refused.value)
    assert refused.value.param == "engine.speculative_config.model"


def test_an_engine_is_built_with_a_head_unless_its_pages_have_8_bits(model, head):
    config = EngineConfig(
        kv_cache_memory_bytes=8 << 20,
        device="cpu",
        speculative_config={"method": "eagle3", "model": str(head), "num_speculative_tokens": 2},
    )

    built = built_engine(model, config)
    try:
        assert built.layout.drafter
        assert built.speculation_counts is not None
    finally:
        built.host.close()
    with pytest.raises(ConfigError, match="an EAGLE-3 head reads need pages of 16 or 32 bits"):
        built_engine(model, replace(config, kv_cache_dtype="fp8_e4m3"))
