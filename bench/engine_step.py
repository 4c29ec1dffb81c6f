"""Where the time of one engine step goes, without scheduler, transfer or HTTP:
`python -m bench.engine_step [--json FILE]`.

Random weights. Decode steps at several batch sizes over contexts of one length, and one chunk of a prompt, each split
into what can be timed from outside: the step's tensors, the layers (attention once more by itself), the output head,
the draw. Figures are medians in milliseconds: `qwen370m_decode_b8_layers_ms`; rates are tokens per second.
`qwen370m_decode_b8_of_memory` is the rate at which a step passes over the weights, counted as the checkpoint holds
them, against that at which torch's sum reads memory in the turns between: what memory allows is 1, and compressed
weights may be beyond. So a decode begins with caches that hold none of the weights.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from baton.generation import Prompt, SamplingParams
from baton.ids import BlockId, SeqId
from baton_engine.cache.arena import KvArena
from baton_engine.kernels.cpu.product_choice import AUTO, choose_product
from baton_engine.kernels.ports import PagedBatch
from baton_engine.kernels.select import check_quantization, choose_kv_dtype
from baton_engine.messages import Generate
from baton_engine.models.config import choose_dtype, is_widened, kv_layout, load_spec
from baton_engine.models.decoder import Decoder
from baton_engine.models.inputs import InputBuilder
from baton_engine.models.loader import load_decoder
from baton_engine.sampling.sampler import Sampler
from baton_engine.scheduling.plan import Row
from baton_engine.scheduling.request import Request
from bench.harness.report import Report
from bench.harness.shapes import SHAPES, write_model

_BLOCK_TOKENS = 16
_SUMMED_BYTES = 256 << 20
_CPU = torch.device("cpu")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of step.

    Attributes:
        name: As in the figures.
        rows: Sequences in it.
        tokens: New tokens of each.
        context: Tokens of each before those.
    """

    name: str
    rows: int
    tokens: int
    context: int


def main() -> None:
    """Entry point."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    report = Report(benchmark="engine_step", settings=settings)
    for shape in arguments.shape:
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
            write_model(SHAPES[shape], Path(directory))
            spec = load_spec(Path(directory))
            product = choose_product(arguments.cpu_product, _CPU)
            dtype = choose_dtype(spec, arguments.dtype, _CPU, product)
            widened = is_widened(spec, arguments.dtype, dtype)
            kv_dtype = choose_kv_dtype("auto", dtype, _CPU, widened=widened)
            check_quantization(arguments.quantization, _CPU, dtype)
            weights_bytes = sum(
                file.stat().st_size for file in Path(directory).glob("*.safetensors")
            )
            decoder = load_decoder(
                Path(directory),
                spec,
                dtype,
                _CPU,
                quantization=arguments.quantization,
                fixed_rows=arguments.deterministic,
                product=product,
            )
        memory = Memory(weights_bytes)
        for case in _cases(arguments):
            bench = Bench(decoder, kv_dtype, case, one_by_one=arguments.deterministic)
            of_memory = memory if case.tokens == 1 else None
            _measure(bench, f"{shape}_{case.name}", case, arguments.rounds, of_memory, report)
    if arguments.json:
        report.write(arguments.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), nargs="+", default=["llama116m", "qwen370m"]
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--cpu-product", default=AUTO, help="as `engine.cpu_product`")
    parser.add_argument("--deterministic", action="store_true", help="as `engine.deterministic`")
    parser.add_argument("--threads", type=int, help="default: torch's own")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=288, help="tokens before a decode step")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of the prompt's chunk")
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def _cases(arguments: argparse.Namespace) -> list[Case]:
    decodes = [
        Case(name=f"decode_b{batch}", rows=batch, tokens=1, context=arguments.context)
        for batch in arguments.batch
    ]
    chunk = arguments.chunk
    return [*decodes, Case(name=f"prefill_{chunk}", rows=1, tokens=chunk, context=0)]


class Bench:
    """A decoder, an arena that is large enough, and the rows of one case."""

    def __init__(
        self, decoder: Decoder, kv_dtype: torch.dtype, case: Case, *, one_by_one: bool
    ) -> None:
        spec, length = decoder.spec, case.context + case.tokens
        blocks = -(-length // _BLOCK_TOKENS)
        layout = kv_layout(spec, kv_dtype, _BLOCK_TOKENS)
        memory = memoryview(bytearray(layout.region_bytes(case.rows * blocks)))
        self._decoder = decoder
        self._arena = KvArena(layout, case.rows * blocks, memory)
        self._builder = InputBuilder(_BLOCK_TOKENS, case.rows * blocks, _CPU, one_by_one=one_by_one)
        self._sampler = Sampler((), _CPU)
        self._rows = [_row(i, blocks, case, spec.vocab_size) for i in range(case.rows)]
        self._kernels = decoder.kernels
        self._query = torch.zeros(case.rows * case.tokens, spec.num_heads, spec.head_dim).to(
            decoder.dtype
        )

    @torch.inference_mode()
    def run(self) -> dict[str, float]:
        """Milliseconds of each part of one step; `attention` is part of `layers`."""
        parts: dict[str, float] = {}
        began_s = time.perf_counter()
        step = _timed(parts, "inputs", lambda: self._builder.build(self._rows))
        hidden = _timed(parts, "layers", lambda: self._decoder.hidden(step, self._arena))
        logits = _timed(parts, "head", lambda: self._decoder.head(hidden))
        _timed(parts, "draw", lambda: self._sampler.sample(logits, self._rows).read())
        parts["step"] = 1e3 * (time.perf_counter() - began_s)
        _timed(parts, "attention", lambda: self._attend_everywhere(step.batch))
        return parts

    def _attend_everywhere(self, batch: PagedBatch) -> None:
        for index, _ in enumerate(self._decoder.layers):
            self._kernels.paged_attention(
                self._query,
                self._arena.layer(index),
                batch,
                1.0,
                None,
            )


class Memory:
    """Memory that no cache holds, to read.

    Args:
        weights_bytes: Of a model, which a decode passes over.
    """

    def __init__(self, weights_bytes: int) -> None:
        self.weights_bytes = weights_bytes
        self._numbers = torch.ones(_SUMMED_BYTES // 4)

    def read_rate(self) -> float:
        """Bytes per second of torch's sum over it."""
        began_s = time.perf_counter()
        self._numbers.sum()
        return _SUMMED_BYTES / (time.perf_counter() - began_s)


def _row(index: int, blocks: int, case: Case, vocab: int) -> Row:
    length = case.context + case.tokens
    tokens = tuple((7 * index + 31 * place) % vocab for place in range(length))
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    prompt = Prompt(prompt_tokens=tokens, sampling=sampling)
    request = Request(asked=Generate(seq_id=SeqId(str(index)), prompt=prompt))
    seq = request.first_sequence()
    seq.blocks += [BlockId(index * blocks + place) for place in range(blocks)]
    return Row(seq=seq, start=case.context, num_tokens=case.tokens, samples=(0,))


def _timed(parts: dict[str, float], name: str, part: Callable[[], _T]) -> _T:
    began_s = time.perf_counter()
    result = part()
    parts[name] = 1e3 * (time.perf_counter() - began_s)
    return result


def _measure(
    bench: Bench, prefix: str, case: Case, rounds: int, memory: Memory | None, report: Report
) -> None:
    bench.run()  # warms up
    runs, rates = [], []
    for _ in range(rounds):
        if memory is not None:
            rates.append(memory.read_rate())
        runs.append(bench.run())
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    for name, value in medians.items():
        report.figures[f"{prefix}_{name}_ms"] = value
    rate = 1e3 * case.rows * case.tokens / medians["step"]
    report.figures[f"{prefix}_tok_s"] = rate
    parts = "  ".join(f"{name} {value:.2f}" for name, value in medians.items())
    line = f"{prefix:24} {rate:8.1f} tok/s   {parts}  (ms)"
    if memory is not None:
        passed_over = 1e3 * memory.weights_bytes / medians["step"]
        of_memory = passed_over / statistics.median(rates)
        report.figures[f"{prefix}_of_memory"] = of_memory
        line += f"  of memory {of_memory:.2f}"
    print(line, flush=True)


if __name__ == "__main__":
    main()
