"""What `bench.gpu_day` does in a process of its own, stage by stage: `python -m bench.gpu.stages STAGE FILE`.

Every figure is appended to FILE as a line of JSON the moment it is known,
so that what a later point breaks is not lost.
"""

import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from baton.generation import Prompt, SamplingParams
from baton.ids import BlockId, SeqId
from baton_engine.cuda_graphs import StepGraphs
from baton_engine.kernels.reference import ReferenceKernels
from baton_engine.messages import Generate
from baton_engine.models.decoder import Decoder
from baton_engine.models.inputs import InputBuilder
from baton_engine.models.prepare import prepare_decoder
from baton_engine.scheduling.plan import Row
from baton_engine.scheduling.request import Request
from bench.gpu.figures import Figures, appended_to
from bench.gpu.loop import arena_for, run_loop
from bench.gpu.models import Ceilings, GpuShape, random_decoder
from bench.gpu.place import Place, find_place
from bench.gpu.points import ModelBench
from bench.gpu.timing import copy_rate, matmul_rate, read_rate
from bench.gpu.verify import Case, attention_errors, token_errors, wrong_ones

_CHANGING_BATCHES = 50
_MOST_CHUNK_TOKENS = 64
_BEYOND_32_BITS = 1 << 31
_SMALL_SHARE = 0.1
"""Of the scores' spread: how far below the best a token may be that is drawn in 16 bits."""


def ceilings(place: Place, figures: Figures) -> None:
    """What the device can do at most."""
    for module in ("torch", "triton", "numpy"):
        print(module, getattr(__import__(module), "__version__", "?"))
    print("device", torch.cuda.get_device_name() if place.on_gpu else "none: host memory")
    measure(place, figures)


def measure(place: Place, figures: Figures | None = None) -> Ceilings:
    """Rates of a copy, of reading and of a product."""
    timer, device = place.timer(), place.device
    size, side = (4 << 30, 8192) if place.on_gpu else (1 << 20, 64)
    copy = copy_rate(timer, device, size)
    found = Ceilings(
        copy=copy,
        read=max(copy, read_rate(timer, device, size)),
        matmul=matmul_rate(timer, device, side),
    )
    if figures is not None:
        figures.add(
            copy_gb_s=found.copy / 1e9,
            read_gb_s=found.read / 1e9,
            matmul_tflop_s=found.matmul / 1e12,
        )
    return found


def compile_kernels(place: Place, figures: Figures) -> None:
    """Compiles what the later stages launch, several at a time; they find it in Triton's cache."""
    begin_s = time.perf_counter()
    wanted = [
        (work, number, dtype)
        for number in range(len(place.shapes))
        for dtype in place.dtypes
        for work in ("attention", "tokens")
    ]
    if not place.on_gpu:
        for one in wanted[:2]:
            _compile(one)
    else:
        with multiprocessing.get_context("spawn").Pool(min(8, os.cpu_count() or 1)) as pool:
            for _ in pool.imap_unordered(_compile, wanted):
                pass
    figures.add(compile_s=time.perf_counter() - begin_s)


def _compile(wanted: tuple[str, int, torch.dtype]) -> None:
    work, number, dtype = wanted
    place = find_place()
    case = replace(_case(place, place.shapes[number], dtype), decodes=(1, 65), prompts=((65, 130),))
    run = attention_errors if work == "attention" else token_errors
    run(place.kernels(dtype), case)


def _case(place: Place, shape: GpuShape, dtype: torch.dtype) -> Case:
    return Case(
        shape=shape,
        device=place.device,
        dtype=dtype,
        block_tokens=place.block_tokens,
        decodes=place.contexts,
        prompts=place.prompts,
    )


def correctness(place: Place, figures: Figures) -> None:
    """Kernels against float64, graphs against eager steps, plan-ahead against the plain loop,
    tokens against float32.
    """
    for number, shape in enumerate(place.shapes):
        for dtype in place.dtypes:
            name = f"{number}_{str(dtype).removeprefix('torch.')}"
            with figures.point(f"kernels_{name}"):
                _check_kernels(place, _case(place, shape, dtype), name, figures)
    if place.on_gpu:
        with figures.point("beyond_32_bits"):
            _check_far_pages(place, figures)
    with figures.point("small_model"):
        _check_small_model(place, figures)


def _check_kernels(place: Place, case: Case, name: str, figures: Figures) -> None:
    kernels = place.kernels(case.dtype)
    errors = attention_errors(kernels, case) | token_errors(kernels, case)
    figures.add(**{f"error_{kernel}_{name}": error for kernel, error in errors.items()})
    figures.add(**{f"correct_kernels_{name}": float(not wrong_ones(errors, case.dtype))})


def _check_far_pages(place: Place, figures: Figures) -> None:
    shape, dtype = place.shapes[0], place.dtypes[0]
    page_elements = shape.kv_token_elements * place.block_tokens
    case = replace(
        _case(place, shape, dtype),
        decodes=(65, 300),
        prompts=((130, 200),),
        first_page=_BEYOND_32_BITS // page_elements + 1,
    )
    _check_kernels(place, case, "beyond_32_bits", figures)


def _check_small_model(place: Place, figures: Figures) -> None:
    """The first shape with four layers at most."""
    shape, dtype = replace(place.shapes[0], layers=min(4, place.shapes[0].layers)), place.dtypes[0]
    kernels, longest = place.kernels(dtype), place.prompt_tokens + place.output_tokens
    decoder = random_decoder(shape, kernels, place.device, dtype, longest)
    figures.add(correct_graphs=float(_graphs_equal_eager(place, decoder, dtype)))
    prompts = _prompts(place, shape.vocab)
    generate = partial(run_loop, place, decoder, dtype, prompts, output_tokens=place.output_tokens)
    plain, ahead = generate(ahead=False), generate(ahead=True)
    figures.add(correct_ahead_greedy=float(plain.tokens == ahead.tokens))
    drawn = generate(ahead=False, seed=7).tokens == generate(ahead=True, seed=7).tokens
    figures.add(correct_ahead_random=float(drawn))
    exact = random_decoder(
        shape, ReferenceKernels(), place.device, torch.float32, longest, drawn_in=dtype
    )
    likely = [
        _share_likely(place, exact, prompt, tokens)
        for prompt, tokens in list(zip(prompts, plain.tokens, strict=True))[:8]
    ]
    figures.add(likely_tokens=min(likely), correct_tokens=float(min(likely) == 1))


def _prompts(place: Place, vocab: int) -> list[list[int]]:
    """Some begin alike, and no two are equally long."""
    numbers = random.Random(0)
    shared = [numbers.randrange(vocab) for _ in range(place.prompt_tokens // 2)]
    return [
        shared + [numbers.randrange(vocab) for _ in range(place.prompt_tokens // 2 - number % 7)]
        for number in range(place.sequences)
    ]


@torch.inference_mode()
def _graphs_equal_eager(place: Place, decoder: Decoder, dtype: torch.dtype) -> bool:
    """Over batches that change in their number, their pages and their contexts, with prompts in every second one:
    bit for bit.
    """
    numbers, most, longest = random.Random(1), 8, min(512, place.longest)
    width = -(-longest // place.block_tokens)
    arena = arena_for(place, decoder, most * width * place.block_tokens, dtype)
    for layer in range(len(decoder.layers)):
        arena.layer(layer).normal_()
    graphs = StepGraphs(
        decoder,
        arena,
        most_rows=most,
        most_chunk_tokens=_MOST_CHUNK_TOKENS,
        table_width=width,
        backend=place.graphs(),
    )
    rule = prepare_decoder(decoder, arena)
    builder = InputBuilder(place.block_tokens, arena.num_blocks, place.device, rule)
    for batch in range(_CHANGING_BATCHES if place.on_gpu else 4):
        pages = numbers.sample(range(arena.num_blocks), arena.num_blocks)
        rows = []
        prompts = batch % 2 * numbers.randint(1, 3)
        for number in range(numbers.randint(1, most)):
            context = numbers.randint(_MOST_CHUNK_TOKENS, longest)
            new = numbers.randint(2, _MOST_CHUNK_TOKENS // 4) if number < prompts else 1
            blocks = [BlockId(page) for page in pages[number * width : (number + 1) * width]]
            rows.append(_row(number, context, new, blocks, decoder.spec.vocab_size, numbers))
        rows.sort(key=lambda row: row.num_tokens)
        held = [arena.layer(layer).clone() for layer in range(len(decoder.layers))]
        scored = graphs.scores(rows).logits.clone()
        for layer, pages_before in enumerate(held):
            arena.layer(layer).copy_(pages_before)
        eager = decoder.forward(builder.build(rows, graphs.padding_of(rows)), arena)[: len(rows)]
        if not torch.equal(scored, eager):
            print("differ by", float((scored - eager).abs().max()), "with rows", len(rows))
            return False
    return True


def _row(
    number: int, context: int, new: int, blocks: list[BlockId], vocab: int, numbers: random.Random
) -> Row:
    tokens = tuple(numbers.randrange(vocab) for _ in range(context))
    prompt = Prompt(prompt_tokens=tokens, sampling=SamplingParams(temperature=0, max_tokens=1))
    sequence = Request(asked=Generate(seq_id=SeqId(str(number)), prompt=prompt)).first_sequence()
    sequence.blocks += blocks
    return Row(seq=sequence, start=context - new, num_tokens=new, samples=(0,))


@torch.inference_mode()
def _share_likely(place: Place, exact: Decoder, prompt: list[int], tokens: list[int]) -> float:
    """How many of the tokens the exact model finds likeliest, or as good as that, each after the ones before it."""
    text = [*prompt, *tokens[:-1]]
    arena = arena_for(place, exact, len(text), torch.float32)
    builder = InputBuilder(place.block_tokens, arena.num_blocks, place.device)
    asked = Prompt(prompt_tokens=tuple(text), sampling=SamplingParams(temperature=0, max_tokens=1))
    sequence = Request(asked=Generate(seq_id=SeqId("0"), prompt=asked)).first_sequence()
    sequence.blocks += [BlockId(page) for page in range(arena.num_blocks)]
    row = Row(
        seq=sequence,
        start=0,
        num_tokens=len(text),
        samples=(0,),
        num_scored=len(text),
    )
    scores = exact.forward(builder.build([row]), arena)[1:][len(prompt) - 1 :]
    drawn = scores.gather(1, torch.tensor(tokens, device=place.device)[:, None])[:, 0]
    short = scores.max(-1).values - drawn
    return float((short <= _SMALL_SHARE * scores.std(-1)).float().mean())


def kernels(place: Place, figures: Figures) -> None:
    """Each kernel alone."""
    bench = _model_bench(place)
    for context in (place.decode_context, max(place.prefills)):
        for batch in place.batches:
            with figures.point(f"decode_attention b{batch} c{context}"):
                if bench.fits(batch, context):
                    found = bench.decode_attention(batch, context)
                    name = f"decode_attention_b{batch}_c{context}"
                    figures.add(**{f"{name}_{what}": value for what, value in found.items()})
    for tokens in place.prefills:
        with figures.point(f"prefill_attention n{tokens}"):
            found = bench.prefill_attention(tokens)
            figures.add(**{f"prefill_attention_n{tokens}_{k}": v for k, v in found.items()})
    with figures.point("fused"):
        for kernel, found in bench.fused(min(place.prefills)).items():
            figures.add(**{f"{kernel}_{what}": value for what, value in found.items()})


def steps(place: Place, figures: Figures) -> None:
    """Whole steps as a share of what the device allows;
    `decode_roofline_*` and `prefill_peak_*` are the goals' figures.
    """
    bench = _model_bench(place)
    for batch in place.batches:
        with figures.point(f"decode b{batch}"):
            found = bench.decode(batch, place.decode_context)
            figures.add(**{f"decode_b{batch}_{what}": value for what, value in found.items()})
            figures.add(**{f"decode_roofline_b{batch}": found["fraction"]})
    for tokens in place.prefills:
        with figures.point(f"prefill n{tokens}"):
            found = bench.prefill(tokens)
            name = f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)
            figures.add(**{f"prefill_{name}_{what}": value for what, value in found.items()})
            figures.add(**{f"prefill_peak_{name}": found["fraction"]})


def _model_bench(place: Place) -> ModelBench:
    shape, dtype = place.shapes[0], place.dtypes[0]
    decoder = random_decoder(shape, place.kernels(dtype), place.device, dtype, place.longest)
    tokens = max(max(place.batches) * place.decode_context, place.longest)
    return ModelBench(
        shape,
        decoder,
        num_blocks=-(-tokens // place.block_tokens) + max(place.batches),
        kv_dtype=dtype,
        block_tokens=place.block_tokens,
        most_rows=max(place.batches),
        longest=place.longest,
        timer=place.timer(),
        graphs=place.graphs(),
        ceilings=measure(place),
    )


def loop(place: Place, figures: Figures) -> None:
    """Many sequences through the engine's loop, with plan-ahead and without."""
    shape, dtype = place.shapes[0], place.dtypes[0]
    decoder = random_decoder(shape, place.kernels(dtype), place.device, dtype, place.longest)
    prompts = _prompts(place, shape.vocab)
    generate = partial(run_loop, place, decoder, dtype, prompts)
    with figures.point("first"):  # loads what is loaded at first use
        generate(output_tokens=2, ahead=True)
    for ahead in (True, False):
        with figures.point(f"ahead {ahead}"):
            run = generate(output_tokens=place.output_tokens, ahead=ahead)
            name = "loop_ahead" if ahead else "loop_plain"
            figures.add(
                **{
                    f"{name}_tok_s": sum(map(len, run.tokens)) / run.seconds,
                    f"{name}_step_ms": run.median_step_s * 1e3,
                }
            )


def digest(place: Place, figures: Figures) -> None:
    """Which kernels a step's time goes to, and how much of it none of them runs."""
    bench = _model_bench(place)
    activities = [ProfilerActivity.CPU]
    if place.on_gpu:
        activities.append(ProfilerActivity.CUDA)
    works: dict[str, Callable[[], object]] = {
        f"decode_b{batch}": bench.decode_work(batch, place.decode_context)
        for batch in place.batches[:2]
    }
    works[f"prefill_n{min(place.prefills)}"] = bench.prefill_work(min(place.prefills))
    for name, work in works.items():
        with figures.point(name):
            with profile(activities=activities):  # the first one takes seconds to begin
                work()
                place.wait()
            with profile(activities=activities) as profiled:
                for _ in range(3):
                    work()
                place.wait()
            order = "self_device_time_total" if place.on_gpu else "self_cpu_time_total"
            table = profiled.key_averages().table
            print(table(sort_by=order, row_limit=14, max_name_column_width=60))
            where = "CUDA" if place.on_gpu else "CPU"
            spans = [
                (event.time_range.start, event.time_range.end)
                for event in profiled.events()
                if event.device_type.name == where
            ]
            figures.add(**{f"profile_{name}_idle": _idle(spans)})


def _idle(spans: list[tuple[float, float]]) -> float:
    """The share of the time between the first one's begin and the last one's end that none of them covers."""
    begin = reached = min(start for start, _ in spans)
    idle = 0.0
    for start, end in sorted(spans):
        idle += max(0.0, start - reached)
        reached = max(reached, end)
    return idle / max(reached - begin, 1e-9)


STAGES: dict[str, Callable[[Place, Figures], None]] = {
    "ceilings": ceilings,
    "compile": compile_kernels,
    "correctness": correctness,
    "steps": steps,
    "loop": loop,
    "kernels": kernels,
    "digest": digest,
}


def main() -> None:
    """Entry point: the stage's exit status is 1 where one of its points broke off."""
    name, file = sys.argv[1:]
    place = find_place()
    figures = Figures(appended_to(Path(file)), counted_as=f"{name}_points_failed")
    STAGES[name](place, figures)
    sys.exit(1 if figures.failed else 0)


if __name__ == "__main__":
    main()
