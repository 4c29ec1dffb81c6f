import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.errors import DeviceLostError, EngineError
from baton.generation import SamplingParams
from baton.ids import BlockId, SeqId
from baton_engine.cache.arena import KvArena
from baton_engine.kernels.ports import KernelSet
from baton_engine.kernels.reference import ReferenceKernels
from baton_engine.models.config import load_spec
from baton_engine.models.decoder import Decoder
from baton_engine.models.loader import load_decoder
from baton_engine.ports import LayerReady, PageExport
from baton_engine.scheduling.plan import NO_TOKEN, Row, StepPlan
from tests.baton_engine.sequences import sequence
from tests.baton_engine.stepping import make_runner, make_texts, run_all
from tests.baton_engine.tiny_models import FAMILIES, make_model, random_prompts

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Makes each family's model once."""
    root = tmp_path_factory.mktemp("models")
    return cache(
        lambda family: make_model(root / family, family, tie=family in ("llama3", "qwen2"))
    )


def load(
    path: Path, dtype: torch.dtype = torch.float32, kernels: KernelSet | None = None
) -> Decoder:
    return load_decoder(path, load_spec(path), dtype, CPU, kernels=kernels)


def continue_prompts(decoder, prompts, params=GREEDY, *, block_tokens=16, chunks=(7, 64, 13)):
    texts, num_blocks = make_texts(prompts, params, block_tokens=block_tokens, chunks=chunks)
    runner, _ = make_runner(decoder, block_tokens=block_tokens, num_blocks=num_blocks)
    run_all(runner, texts)
    return texts


@torch.no_grad()
def assert_greedy(path: Path, prompt: list[int], generated: list[int]) -> None:
    """Transformers generates the same, up to where its own best two tokens are closer than 1e-4."""
    # transformers' types do not let a model generate
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    model.generation_config.eos_token_id = None
    inputs = torch.tensor([prompt])
    expected = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=len(generated),
    )[0, len(prompt) :].tolist()
    for place, (ours, theirs) in enumerate(zip(generated, expected, strict=True)):
        if ours != theirs:
            best = model(torch.tensor([prompt + expected[:place]])).logits[0, -1].topk(2).values
            assert best[0] - best[1] < 1e-4, (
                f"token {place}: {ours}, but transformers says {theirs}"
            )
            return


@pytest.mark.parametrize("block_tokens", [1, 4, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(models, family, block_tokens):
    prompts = random_prompts(6, 150, seed=block_tokens)
    texts = continue_prompts(load(models(family)), prompts, block_tokens=block_tokens)
    for prompt, text in zip(prompts, texts, strict=True):
        assert_greedy(models(family), prompt, [drawn.token for drawn in text.drawn])


def test_greedy_tokens_equal_transformers_far_into_the_context(models):
    (prompt,) = random_prompts(2, 1500, seed=3)[1:]
    (text,) = continue_prompts(load(models("llama3")), [prompt], chunks=(333,))
    assert_greedy(models("llama3"), prompt, [drawn.token for drawn in text.drawn])


def test_qwen_layers_with_and_without_a_window_equal_transformers(tmp_path):
    windows: dict[str, Any] = {"sliding_window": 16, "max_window_layers": 1}
    path = make_model(tmp_path, "qwen2", num_layers=3, use_sliding_window=True, **windows)
    assert load_spec(path).windows == (None, 16, 16)
    prompts = random_prompts(3, 80)
    for prompt, text in zip(prompts, continue_prompts(load(path), prompts), strict=True):
        assert_greedy(path, prompt, [drawn.token for drawn in text.drawn])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_biases_on_every_projection_equal_transformers(tmp_path, family):
    more: dict[str, Any] = {"mlp_bias": True} if family == "llama" else {}
    path = make_model(tmp_path, family, attention_bias=True, **more)
    prompts = random_prompts(2, 40)
    for prompt, text in zip(prompts, continue_prompts(load(path), prompts), strict=True):
        assert_greedy(path, prompt, [drawn.token for drawn in text.drawn])


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"head_dim": 32}, id="heads wider than hidden"),
        pytest.param({"num_kv_heads": 4}, id="as many KV heads as heads"),
        pytest.param({"num_kv_heads": 1}, id="one KV head"),
        pytest.param({"num_heads": 6, "head_dim": 8}, id="heads narrower than hidden"),
    ],
)
def test_every_shape_of_heads_equals_transformers(tmp_path, shape):
    path = make_model(tmp_path, "qwen3", **shape)
    prompts = random_prompts(2, 40)
    for prompt, text in zip(prompts, continue_prompts(load(path), prompts), strict=True):
        assert_greedy(path, prompt, [drawn.token for drawn in text.drawn])


def test_a_config_as_llama_2_had_it_equals_transformers(tmp_path):
    path = make_model(tmp_path, "llama", num_kv_heads=4)
    config = json.loads((path / "config.json").read_text())
    for newer in ("rope_parameters", "head_dim", "num_key_value_heads", "dtype", "attention_bias"):
        config.pop(newer, None)
    config |= {"rope_scaling": None, "torch_dtype": "float32"}
    (path / "config.json").write_text(json.dumps(config))
    prompts = random_prompts(2, 40)
    for prompt, text in zip(prompts, continue_prompts(load(path), prompts), strict=True):
        assert_greedy(path, prompt, [drawn.token for drawn in text.drawn])


def test_linear_scaling_equals_transformers(tmp_path):
    rope = {"rope_type": "linear", "factor": 2.5, "rope_theta": 500.0}
    path = make_model(tmp_path, "llama", rope_parameters=rope)
    prompts = random_prompts(2, 40)
    for prompt, text in zip(prompts, continue_prompts(load(path), prompts), strict=True):
        assert_greedy(path, prompt, [drawn.token for drawn in text.drawn])


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_within_1e_4_of_transformers(models, family):
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=5)
    (prompt,) = random_prompts(2, 60, seed=5)[1:]
    (text,) = continue_prompts(load(models(family)), [prompt], params)
    model = AutoModelForCausalLM.from_pretrained(models(family))
    with torch.no_grad():
        logits = model(torch.tensor([text.seq.tokens[:-1]])).logits[0, -2:]
    for drawn, expected in zip(text.drawn, logits.log_softmax(-1), strict=True):
        best = expected.topk(5)
        assert list(drawn.logprobs.top_tokens) == best.indices.tolist()
        assert list(drawn.logprobs.top_logprobs) == pytest.approx(best.values.tolist(), abs=1e-4)
        assert drawn.logprobs.logprob == pytest.approx(expected[drawn.token].item(), abs=1e-4)
        assert drawn.logprobs.rank == 1


def test_torch_kernels_draw_the_same_tokens(models):
    prompts = random_prompts(3, 50)
    fast = continue_prompts(load(models("qwen3")), prompts)
    slow = continue_prompts(load(models("qwen3"), kernels=ReferenceKernels()), prompts)
    assert [text.seq.tokens for text in fast] == [text.seq.tokens for text in slow]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_stays_close_to_float32(models, dtype):
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=3)
    prompts = random_prompts(3, 50)
    halves = continue_prompts(load(models("llama"), dtype), prompts, params)
    wholes = continue_prompts(load(models("llama")), prompts, params)
    for half, whole in zip(halves, wholes, strict=True):
        likely = dict(whole.drawn[0].logprobs.top(3))
        seen = [(p, likely[token]) for token, p in half.drawn[0].logprobs.top(3) if token in likely]
        assert seen
        assert all(abs(ours - theirs) < 0.15 for ours, theirs in seen)


def test_executing_a_plan_again_draws_the_same_and_writes_the_same(models):
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=1)
    (text,), num_blocks = make_texts([[5, 6, 7, 8, 9]], params, block_tokens=4, chunks=(9,))
    runner, arena = make_runner(load(models("llama")), block_tokens=4, num_blocks=num_blocks)
    plan = StepPlan(step=0, rows=(text.row(),))
    first = runner.execute(plan)
    pages = arena.layer(1).clone()
    assert runner.execute(plan) == first
    assert torch.equal(arena.layer(1), pages)


def test_several_samples_of_one_row_are_drawn_from_one_prompt(models):
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=1)
    (text,), num_blocks = make_texts([[5, 6, 7]], params, block_tokens=4, chunks=(9,))
    runner, _ = make_runner(load(models("llama")), block_tokens=4, num_blocks=num_blocks)
    row = Row(seq=text.seq, start=0, num_tokens=3, samples=(0, 1, 2, 3, 4, 5))
    tokens = runner.execute(StepPlan(step=0, rows=(row,))).tokens
    assert len(tokens) == 6
    assert len(set(tokens)) > 1


def test_copies_are_made_before_anything_is_computed(models):
    decoder = load(models("llama"))
    texts, _ = make_texts([[9, 8, 7, 6, 5, 4]], GREEDY, block_tokens=4, chunks=(9,))
    seq = texts[0].seq
    runner, _ = make_runner(decoder, block_tokens=4, num_blocks=12)
    seq.blocks = [BlockId(0), BlockId(1)]
    runner.execute(StepPlan(step=0, rows=(Row(seq=seq, start=0, num_tokens=5, samples=()),)))
    straight = runner.execute(
        StepPlan(step=1, rows=(Row(seq=seq, start=5, num_tokens=1, samples=(0,)),))
    )
    seq.blocks = [BlockId(0), BlockId(7)]
    copied = runner.execute(
        StepPlan(
            step=2,
            rows=(Row(seq=seq, start=5, num_tokens=1, samples=(0,)),),
            copies=((BlockId(1), BlockId(7)),),
        )
    )
    assert copied == straight


def test_a_text_whose_scores_are_not_finite_fails_alone(models):
    texts, num_blocks = make_texts(
        [[5, 6, 7, 8, 9], [9, 8, 7]], GREEDY, block_tokens=4, chunks=(9,)
    )
    runner, arena = make_runner(load(models("llama")), block_tokens=4, num_blocks=num_blocks)
    plan = StepPlan(step=0, rows=tuple(text.row() for text in texts))
    healthy = runner.execute(plan)
    assert healthy.failed == ()
    first, *_ = texts[0].seq.blocks
    arena.layer(0)[first] = float("nan")
    later = Row(seq=texts[0].seq, start=4, num_tokens=1, samples=(0,))
    result = runner.execute(StepPlan(step=1, rows=(later, texts[1].row())))
    assert result.tokens == [NO_TOKEN, healthy.tokens[1]]
    ((place, error),) = result.failed
    assert place == 0
    assert "not finite" in error.message


class RecordingSink:
    """Remembers what each layer's pages held when it was told."""

    def __init__(self) -> None:
        self.arena: KvArena | None = None
        self.told: list[tuple[int, tuple[PageExport, ...], torch.Tensor]] = []

    def save_kv_layer(self, layer: LayerReady) -> None:
        assert self.arena is not None
        index = layer.layer_index
        self.told.append((index, tuple(layer.exports), self.arena.layer(index)[0].clone()))


def test_the_sink_hears_of_each_layer_once_its_pages_are_complete(models):
    sink = RecordingSink()
    runner, arena = make_runner(load(models("llama")), block_tokens=4, num_blocks=3, sink=sink)
    sink.arena = arena
    (text,), _ = make_texts([[5, 6, 7, 8]], GREEDY, block_tokens=4, chunks=(9,))
    text.seq.blocks = [BlockId(0), BlockId(1), BlockId(2)]
    export = PageExport(seq_id=SeqId("0"), first_block=0, blocks=(BlockId(0),))
    runner.execute(StepPlan(step=0, rows=(text.row(),), exports=(export,)))
    assert [(layer, exports) for layer, exports, _ in sink.told] == [(0, (export,)), (1, (export,))]
    for layer, _, page in sink.told:
        assert torch.equal(page, arena.layer(layer)[0])


def test_the_sink_hears_nothing_when_nothing_leaves(models):
    sink = RecordingSink()
    runner, _ = make_runner(load(models("llama")), block_tokens=4, num_blocks=3, sink=sink)
    (text,), _ = make_texts([[5]], GREEDY, block_tokens=4, chunks=(9,))
    runner.execute(StepPlan(step=0, rows=(text.row(),)))
    assert sink.told == []


class CudaError(torch.AcceleratorError):
    """As torch tells what CUDA answers."""

    def __init__(self, words: str, error_code: int) -> None:
        super().__init__(f"CUDA error: {words}")
        self.error_code = error_code


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (CudaError("an illegal memory access was encountered", 700), DeviceLostError),
        (CudaError("out of memory", 2), EngineError),  # pinned memory of the host
        (torch.OutOfMemoryError("CUDA out of memory"), EngineError),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), EngineError),
    ],
)
def test_a_fault_after_which_a_gpu_computes_nothing_is_its_loss(models, monkeypatch, fault, told):
    runner, arena = make_runner(load(models("llama")), block_tokens=4, num_blocks=3)

    def break_off(pairs: object) -> None:
        raise fault

    monkeypatch.setattr(arena, "copy_pages", break_off)
    seq = sequence([5], GREEDY, blocks=[0])
    row = Row(seq=seq, start=0, num_tokens=1, samples=(0,))
    with pytest.raises(told) as raised:
        runner.execute(StepPlan(step=7, rows=(row,)))
    assert type(raised.value) is told
    assert "step 7" in str(raised.value)


@pytest.mark.parametrize(
    ("tokens", "blocks", "complaint"),
    [([5] * 9, [0], "do not cover"), ([5], [99], "outside the arena"), ([10**6], [0], "failed")],
)
def test_a_row_that_cannot_be_computed_is_an_engine_error(models, tokens, blocks, complaint):
    runner, _ = make_runner(load(models("llama")), block_tokens=4, num_blocks=3)
    seq = sequence(tokens, GREEDY, blocks=blocks)
    row = Row(seq=seq, start=0, num_tokens=len(tokens), samples=(0,))
    with pytest.raises(EngineError, match=complaint):
        runner.execute(StepPlan(step=0, rows=(row,)))


@pytest.mark.parametrize("slice_bytes", [1, 64 * 1024 * 1024], ids=["token by token", "at once"])
def test_prompt_logprobs_are_within_1e_4_of_transformers(models, slice_bytes, monkeypatch):
    monkeypatch.setattr("baton_engine.sampling.logprobs.MAX_LOGITS_BYTES", slice_bytes)
    path = models("qwen3")
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3)
    prompts = random_prompts(4, 90, seed=5)
    plain = continue_prompts(load(path), prompts)
    model = AutoModelForCausalLM.from_pretrained(path)
    scored = continue_prompts(load(path), prompts, params)
    for prompt, text, other in zip(prompts, scored, plain, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert len(text.scores) == len(prompt) - 1
        for row, token, score in zip(expected[:-1], prompt[1:], text.scores, strict=True):
            assert score.logprob == pytest.approx(row[token].item(), abs=1e-4)
            best = row.topk(3).values.tolist()
            assert list(score.top_logprobs) == pytest.approx(best, abs=1e-4)
            assert score.rank - 1 <= int((row > row[token] - 2e-4).sum())
        assert [d.token for d in text.drawn] == [d.token for d in other.drawn[:2]]


def test_scoring_one_text_changes_no_token_of_another(models):
    decoder = load(models("qwen2"))
    prompts = random_prompts(3, 40, seed=8)
    asked = [
        SamplingParams(temperature=1, seed=4, max_tokens=6, prompt_logprobs=k) for k in (None, 2)
    ]
    alone: list[int] = []
    beside: list[int] = []
    for params, drawn in zip(asked, (alone, beside), strict=True):
        texts, num_blocks = make_texts(prompts, params, block_tokens=16, chunks=(64,))
        request = texts[0].seq.request
        prompt = replace(request.prompt, sampling=asked[0])
        request.asked = replace(request.asked, prompt=prompt)
        runner, _ = make_runner(decoder, block_tokens=16, num_blocks=num_blocks)
        run_all(runner, texts)
        drawn += [draw.token for draw in texts[0].drawn]
    assert alone == beside
