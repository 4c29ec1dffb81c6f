"""What guessed tokens bring: `python -m bench.speculation [--shape llama116m] [--rounds N] [--only WAY ...] [--batches
N ...] [--json FILE]`.

Two engines over one model, one with drafts and one without, in turns, each in a process of its own: drafts from
n-grams; by suffix, from the text and from the outputs before it; from a draft model, the first two layers of the model
under the same head; from one that is always wrong, whose head names another token; and from the model itself, all of
whose drafts have to be accepted, though they cost as much as they bring. The model has random weights, but for its
head, which makes it say a passage of 64 tokens over and over; what it draws at a temperature leaves the passage every
dozen tokens and goes on at another place of it, as edited code or an extracted text repeats what stands before, with
changes. Random text is drawn from 24 tokens alike, so that pairs of them come again while what followed is mostly
wrong: drafts are found, and the engine has to learn that they do not pay. Recurring text is the passage behind prompts
that hold a few of its tokens: an answer repeats the answers before it, but not its prompt.
That both engines say the same is counted.

What looking drafts up takes is measured without a model: Python sources of the standard library are read on in, as if
all drafts were verified, by the words behind the first 1,000 of each.
"""

import argparse
import json
import multiprocessing
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING

from baton.config.schema import EngineConfig, ModelConfig
from baton.config.speculative import NgramSpeculation, SuffixSpeculation, read_speculative
from baton.generation import Prompt, SamplingParams
from baton.ids import SeqId
from baton.tokens import PackedTokens
from baton_engine.messages import Generate, StepEvents
from baton_engine.scheduling.drafts import NgramIndex
from baton_engine.scheduling.suffixes import SuffixDrafter, SuffixIndex
from bench.harness.report import Report
from bench.harness.shapes import SHAPES, write_model
from kv_transfer.memory.arena import WorkerMemory

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from baton_engine.build import BuiltEngine

NGRAMS: dict[str, object] = {
    "method": "ngram",
    "num_speculative_tokens": 8,
    "prompt_lookup_max": 5,
    "prompt_lookup_min": 2,
}
SUFFIXES: dict[str, object] = {"method": "suffix"}
_DRAFT_LAYERS, _NUM_DRAFTS = 2, 5
WAYS = ("ngram", "suffix", "draft_model", "wrong_drafter", "equal_drafter")
_PROMPT, _SHORT_PROMPT, _TOKENS = 128, 16, 160
_PASSAGE = range(1000, 1064)
_RANDOM = range(1000, 1024)
_COPYING, _RANDOMLY = 1.5, 1000.0
"""Temperatures: at the first one the head's choice is left every dozen tokens, at the second all tokens are alike."""

_KINDS: dict[str, tuple[range, float, int]] = {
    "repetitive": (_PASSAGE, _COPYING, _PROMPT),
    "random": (_RANDOM, _RANDOMLY, _PROMPT),
    "recurring": (_PASSAGE, _COPYING, _SHORT_PROMPT),
}
"""Of texts: their tokens, temperature and length of prompt."""

_BY_LOOKING_UP: dict[str, dict[str, object]] = {"ngram": NGRAMS, "suffix": SUFFIXES}
_SOURCES, _WORDS, _KNOWN_WORDS = 12, 2500, 1000

_Texts = dict[SeqId, list[int]]


class Timed:
    """A running engine, and what it says.

    Args:
        built: Closed by whoever built it.
    """

    def __init__(self, built: "BuiltEngine") -> None:
        self._host = built.host
        self._host.attach(self._hear)
        self._host.start()
        self._names = (SeqId(f"bench/{number}") for number in count())
        self._texts: _Texts = {}
        self._first_s = 0.0
        self._num_first = 0
        self._last_s = 0.0
        self._left = 0
        self._over = threading.Event()

    def _hear(self, told: StepEvents) -> None:
        if told.sampled is None:
            return
        self._last_s = time.perf_counter()
        for seq_id, token in zip(told.sampled.seq_ids, told.sampled.tokens, strict=True):
            self._texts[seq_id].append(token)
        if not self._num_first and all(self._texts.values()):
            self._first_s = self._last_s
            self._num_first = sum(map(len, self._texts.values()))
        self._left -= sum(reason is not None for reason in told.sampled.finish_reasons)
        if self._left <= 0:
            self._over.set()

    def run(self, prompts: Sequence[Prompt]) -> tuple[float, list[list[int]]]:
        """Tokens per second once all of `prompts` decode, and their texts."""
        names = [next(self._names) for _ in prompts]
        self._texts = {name: [] for name in names}
        self._num_first, self._left = 0, len(prompts)
        self._over.clear()
        for name, prompt in zip(names, prompts, strict=True):
            self._host.submit(Generate(seq_id=name, prompt=prompt))
        if not self._over.wait(300.0):
            raise RuntimeError("the engine did not answer")
        texts = [self._texts[name] for name in names]
        return (sum(map(len, texts)) - self._num_first) / (self._last_s - self._first_s), texts


def _serve(asked: "Connection", model: Path, speculation: dict[str, object]) -> None:
    """One engine in its process, until there are no more prompts. It is built in a thread that ends, as a worker's is:
    two OpenMP teams in one process let each other sleep at each of a step's barriers.
    """
    with ThreadPoolExecutor(1) as thread:
        built = thread.submit(_build, model, speculation).result()
    timed = Timed(built)
    asked.send(None)  # it is ready
    while prompts := asked.recv():
        rate, texts = timed.run(prompts)
        counts = built.speculation_counts
        drafts = (0, 0) if counts is None else (counts.draft_tokens, counts.accepted_tokens)
        asked.send((rate, texts, drafts))
    built.host.close()


class EngineProcess:
    """An engine that another process runs; `with` ends it.

    Args:
        model: Directory of the model.
        speculation: How it guesses; empty for not at all.

    Attributes:
        drafts: Tokens that it has guessed, and those of them that were accepted.
    """

    def __init__(self, model: Path, speculation: dict[str, object]) -> None:
        self.drafts = (0, 0)
        spawning = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawning.Pipe()
        self._process = spawning.Process(
            target=_serve, args=(theirs, model, speculation), daemon=True
        )
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def run(self, prompts: Sequence[Prompt]) -> tuple[float, list[list[int]]]:
        """See Timed."""
        self._pipe.send(prompts)
        rate, texts, self.drafts = self._pipe.recv()
        return rate, texts

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        self._process.join()


def make_repeat(directory: Path) -> None:
    """Gives the model in `directory` a head of its own, by which each token of the passage is followed by the next, the
    last by the first: the next one's row is the embedding of the one before.
    What layers add to the embedding is made small.
    """
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] *= 0.02
    embedding = weights["model.embed_tokens.weight"]
    head = embedding.clone()
    head[[*_PASSAGE]] = embedding[[_PASSAGE[-1], *_PASSAGE[:-1]]]
    weights["lm_head.weight"] = head
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))


def _prompts(number: int, batch: int, kind: str) -> list[Prompt]:
    tokens, temperature, length = _KINDS[kind]
    repeats = tokens is _PASSAGE
    drawn = SamplingParams(
        max_tokens=_TOKENS,
        ignore_eos=True,
        temperature=temperature,
        allowed_token_ids=PackedTokens.of(tokens),
    )
    return [
        Prompt(
            prompt_tokens=tuple(
                tokens[(place + 17 * i) % len(tokens) if repeats else rng.randrange(len(tokens))]
                for place in range(length)
            ),
            sampling=replace(drawn, seed=100 * number + i),
        )
        for i in range(batch)
        for rng in [Random(100 * number + i)]
    ]


def _build(directory: Path, speculation: dict[str, object]) -> "BuiltEngine":
    from baton_engine.build import build_engine

    return build_engine(
        ModelConfig(model=str(directory), max_model_len=1024),
        EngineConfig(kv_cache_memory_bytes=256 << 20, speculative_config=speculation),
        secret=bytes(32),
        memory=WorkerMemory(),
        sink=None,
        progress=lambda _what, _fraction: None,
    )


def make_drafter(model: Path, directory: Path, *, is_wrong: bool) -> dict[str, object]:
    """Writes the first layers of `model` as one of its own, whose head names the token after the right one where it
    `is_wrong`; returns how to ask for it.
    """
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, directory)
    weights = load_file(model / "model.safetensors")
    left_out = [f"model.layers.{index}." for index in range(_DRAFT_LAYERS, 1000)]
    kept = {name: w for name, w in weights.items() if not name.startswith(tuple(left_out))}
    if is_wrong:
        kept["lm_head.weight"] = kept["lm_head.weight"].roll(1, 0).contiguous()
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": _DRAFT_LAYERS}
    (directory / "config.json").write_text(json.dumps(config))
    return _by_model(directory)


def _by_model(directory: Path) -> dict[str, object]:
    return {
        "method": "draft_model",
        "model": str(directory),
        "num_speculative_tokens": _NUM_DRAFTS,
    }


def measure_lookups(way: str) -> dict[str, float]:
    """CPU microseconds of reading on in a text and finding its drafts,
    and tokens that are drafted and right per step.
    """
    config = read_speculative(_BY_LOOKING_UP[way])
    assert isinstance(config, NgramSpeculation | SuffixSpeculation)
    new_index, read_ended = _lookup(config)
    taken_us: list[float] = []
    drafted = right = 0
    for text in _sources():
        read_ended(_WORDS)
        index = new_index()
        known = text[:_KNOWN_WORDS]
        index.read(known, len(known))
        while len(known) < len(text):
            begun_s = time.thread_time()
            index.read(known, _WORDS)
            drafts = index.continuation(known, config.num_speculative_tokens)
            taken_us.append(1e6 * (time.thread_time() - begun_s))
            said = text[len(known) :]
            pairs = enumerate(zip(drafts, said, strict=False))
            num_right = next(
                (i for i, (one, other) in pairs if one != other), min(len(drafts), len(said))
            )
            drafted += len(drafts)
            right += num_right
            known += said[: num_right + 1]
        if isinstance(index, SuffixIndex):
            index.end(known)
    taken_us.sort()
    return {
        f"{way}_lookup_us_p50": taken_us[len(taken_us) // 2],
        f"{way}_lookup_us_p99": taken_us[len(taken_us) * 99 // 100],
        f"{way}_lookup_drafted_per_step": drafted / len(taken_us),
        f"{way}_lookup_right_per_step": right / len(taken_us),
    }


def _lookup(
    config: NgramSpeculation | SuffixSpeculation,
) -> tuple[Callable[[], NgramIndex | SuffixIndex], Callable[[int], int]]:
    """Makes the index of another text; reads texts that have ended."""
    if isinstance(config, SuffixSpeculation):
        drafter = SuffixDrafter(config)
        return lambda: drafter.index("", _KNOWN_WORDS), drafter.read_ended
    shortest, longest = config.prompt_lookup_min, config.prompt_lookup_max
    return lambda: NgramIndex(shortest, longest), lambda _most: 0


def _sources() -> list[list[int]]:
    """Words and signs of some sources, as tokens."""
    numbers: dict[str, int] = {}
    files = sorted(Path(argparse.__file__).parent.glob("[a-d]*.py"))
    longest = sorted(files, key=lambda file: -file.stat().st_size)[:_SOURCES]
    return [
        [
            numbers.setdefault(word, len(numbers))
            for word in re.findall(r"\w+|[^\w\s]|\s+", file.read_text(encoding="utf-8"))
        ][:_WORDS]
        for file in longest
    ]


def measure(
    directory: Path,
    rounds: int,
    only: Sequence[str],
    batches: Sequence[int],
    figures: dict[str, float],
) -> None:
    """Fills `figures` with all of `only` these ways to guess, and tells them as they come."""
    model = directory / "model"
    ways = {
        "ngram": lambda: NGRAMS,
        "suffix": lambda: SUFFIXES,
        "draft_model": lambda: make_drafter(model, directory / "drafter", is_wrong=False),
        "wrong_drafter": lambda: make_drafter(model, directory / "wrong", is_wrong=True),
        "equal_drafter": lambda: _by_model(model),
    }
    for way in _BY_LOOKING_UP:
        if way in only:
            found = measure_lookups(way)
            figures |= found
            print(f"{way}: {found}", flush=True)
    with EngineProcess(model, {}) as plain:
        for way in only:
            with EngineProcess(model, ways[way]()) as guessing:
                _of_one_way(way, guessing, plain, rounds, batches, figures)


def _of_one_way(
    way: str,
    guessing: EngineProcess,
    plain: EngineProcess,
    rounds: int,
    batches: Sequence[int],
    figures: dict[str, float],
) -> None:
    for name in _KINDS:
        if (way == "equal_drafter" and name == "random") or (
            way not in _BY_LOOKING_UP and name == "recurring"
        ):
            continue
        for batch in batches:
            found = _contest(guessing, plain, rounds, batch, name)
            figures |= {f"{way}_{key}_{name}_b{batch}": value for key, value in found.items()}
            print(f"{way}, {name}, batch {batch}: {found}", flush=True)


def _contest(
    guessing: EngineProcess,
    plain: EngineProcess,
    rounds: int,
    batch: int,
    kind: str,
) -> dict[str, float]:
    """Turn about, the first round for warming up."""
    rates: tuple[list[float], list[float]] = ([], [])
    same = 0
    before = guessing.drafts
    for number in range(rounds + 1):
        prompts = _prompts(number, batch, kind)
        sides = [guessing, plain] if number % 2 else [plain, guessing]
        told = {id(side): side.run(prompts) for side in sides}
        (guessing_rate, guessed), (plain_rate, wanted) = told[id(guessing)], told[id(plain)]
        same += sum(one == other for one, other in zip(guessed, wanted, strict=True))
        if number:
            rates[0].append(guessing_rate)
            rates[1].append(plain_rate)
    drafted, accepted = (now - then for now, then in zip(guessing.drafts, before, strict=True))
    ratios = [one / other for one, other in zip(*rates, strict=True)]
    return {
        "over_plain": median(ratios),
        "plain_tok_s": median(rates[1]),
        "per_token": drafted / ((rounds + 1) * batch * _TOKENS),
        "acceptance": accepted / drafted if drafted else 0.0,
        "same_texts": same / ((rounds + 1) * batch),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama116m")
    parser.add_argument("--rounds", type=int, default=5, help="turns of either engine")
    parser.add_argument("--only", choices=WAYS, nargs="+", default=WAYS, help="ways to guess")
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 8), help="texts at once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    arguments = parser.parse_args(argv)
    report = Report(
        benchmark="speculation",
        settings={
            "shape": arguments.shape,
            "rounds": arguments.rounds,
            "prompt_tokens": _PROMPT,
            "short_prompt_tokens": _SHORT_PROMPT,
            "output_tokens": _TOKENS,
            "draft_layers": _DRAFT_LAYERS,
            "num_drafts_by_model": _NUM_DRAFTS,
        }
        | {name: str(value) for name, value in NGRAMS.items()},
    )
    with report.written_to(arguments.json), tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        write_model(SHAPES[arguments.shape], model)
        make_repeat(model)
        measure(
            Path(directory), arguments.rounds, arguments.only, arguments.batches, report.figures
        )
    for name, value in sorted(report.figures.items()):
        print(f"{name:40} {value:.3f}")


if __name__ == "__main__":
    main()
