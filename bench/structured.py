"""What holding answers to grammars costs: `python -m bench.structured [--shape llama116m] [--rounds N] [--json FILE]`.

With a vocabulary of 131,072 made-up tokens: compiling 200 schemas of the kinds that clients send, the masks of their
answers, the time to first token with a schema that is new to router and worker (what a router takes longer for a
conversation of 2,000 characters with a schema than without one is added to what a worker does), and decodes of eight
sequences with a schema, without one, and half of each, in turns in one engine: a round has each once, in an order that
turns round, and gives one ratio of their mean steps; told is the median of the rounds' ratios. Then sequences without a
form beside one, and beside four, of a form whose masks take long, of several kinds, and beside as many more without: how
much longer their mean steps take.
"""

import argparse
import asyncio
import json
import string
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry

from baton.config.schema import EngineConfig, GrammarConfig, ModelConfig
from baton.errors import BatonError
from baton.generation import Prompt, SamplingParams
from baton.ids import SeqId
from baton_engine.messages import Generate, StepEvents
from bench.harness.percentile import percentile
from bench.harness.report import Report
from bench.harness.shapes import SHAPES, write_model
from kv_transfer.memory.arena import WorkerMemory
from router.generation.answer_form import AnswerForm
from router.generation.grammars import GrammarChecker
from router.templates.renderer import Conversation
from router.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from baton_engine.build import BuiltEngine
    from baton_engine.grammar import MatcherCompiler
    from baton_engine.ports import TokenConstraint

VOCABULARY = 131_072
_END = 1
_SEQUENCES, _TOKENS = 8, 48
_SCHEMAS = 200
_HOSTILE = {
    "counted": "([a-z0-9 ]{1,200}[A-Z]){1,40}",
    "looking_back": "(.*a.{12}b)*",
    "alternatives": f"({'|'.join(f'[a-{chr(97 + i % 26)}]*x{i}' for i in range(200))})*",
}
"""Regular expressions within all limits."""

_CONVERSATION = Conversation(
    messages=({"role": "user", "content": ("What does this letter ask us for? " * 60)[:2000]},)
)
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_Schema = dict[str, Any]
_T = TypeVar("_T")


def write_tokenizer(directory: Path, size: int) -> None:
    """A byte-level `tokenizer.json` of `size` tokens that look like those of a text: words, numbers, indentation,
    punctuation; and a chat template.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    rng = Random(0)
    words = dict.fromkeys(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    words |= dict.fromkeys(f"{number}" for number in range(1000))
    words |= dict.fromkeys("Ġ" * width for width in range(1, 64))
    marks = ['":', '",', '"}', '":"', '","', "},", "{}", "[]", "],", 'Ġ"', "Ċ", "ĊĠĠ", '{"']
    words |= dict.fromkeys(marks)
    syllables = [c + v for c in "bcdfghjklmnpqrstvwxyz" for v in ("a", "e", "i", "o", "u", "en")]
    while len(words) < size:
        word = "".join(rng.choices(syllables, k=rng.randint(1, 4))) + rng.choice(["", "s", "ing"])
        words[rng.choice(["", "Ġ", "Ġ"]) + rng.choice([word, word.title()])] = None
    ids = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))


def schema(rng: Random, depth: int = 3) -> _Schema:
    """One like those that clients send: an object of a few named values, some of them lists or objects."""
    names = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 10))) for _ in range(6)]
    chosen = names[: rng.randint(2, 6)]
    return {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in chosen},
        "required": chosen[: rng.randint(1, len(chosen))],
        "additionalProperties": False,
    }


def _value(rng: Random, depth: int) -> _Schema:
    simple: list[_Schema] = [
        {"type": "string"},
        {"type": "string", "maxLength": rng.randint(5, 80)},
        {"type": "string", "format": rng.choice(["date", "date-time", "uuid", "email"])},
        {"type": "string", "pattern": rng.choice(["^[A-Z]{2}\\d{4}$", "^\\w+@\\w+$"])},
        {"type": "integer", "minimum": 0, "maximum": rng.randint(10, 9999)},
        {"type": "number"},
        {"type": "boolean"},
        {"enum": [f"value {number}" for number in range(rng.randint(2, 20))]},
        {"type": ["string", "null"]},
    ]
    if depth <= 0 or rng.random() < 0.6:
        return rng.choice(simple)
    inner = schema(rng, depth) if rng.random() < 0.5 else _value(rng, depth - 1)
    return rng.choice(
        [inner, {"type": "array", "items": inner}, {"anyOf": [{"type": "null"}, inner]}]
    )


async def checked(
    values: Sequence[_Schema] | Sequence[str], kind: Literal["json", "regex"] = "json"
) -> tuple[list[str], list[float]]:
    """The grammars of forms as the router sends them, and the seconds that its check of each took."""
    checker = GrammarChecker(GrammarConfig(max_compiled=1), (), CollectorRegistry())
    grammars, seconds = [], []
    for value in values:
        begun_s = time.perf_counter()
        form = AnswerForm(kind=kind, value=value, param="bench")
        grammars.append(await checker.text_of(form, "bench"))
        seconds.append(time.perf_counter() - begun_s)
    checker.close()
    return grammars, seconds


async def added_by_forms(directory: Path, schemas: Sequence[_Schema]) -> list[float]:
    """How many seconds longer it takes a router to have the token ids of a conversation and the grammar of each schema
    than those alone.
    """
    checker = GrammarChecker(GrammarConfig(max_compiled=1), (), CollectorRegistry())
    tokenizer = Tokenizer.load(directory)
    encode = partial(tokenizer.encode_chat, _CONVERSATION, tenant_id="bench")
    await encode()  # its first one starts a process
    alone_s, both_s = [], []
    for value in schemas:
        begun_s = time.perf_counter()
        await encode()
        alone_s.append(time.perf_counter() - begun_s)
        begun_s = time.perf_counter()
        form = AnswerForm(kind="json", value=value, param="bench")
        await checker.begin(form, "bench").text_beside(encode)
        both_s.append(time.perf_counter() - begun_s)
    checker.close()
    tokenizer.close()
    usual_s = median(alone_s)
    return [seconds - usual_s for seconds in both_s]


def compiled(compiler: "MatcherCompiler", grammar: str) -> "TokenConstraint":
    """Waits for it."""
    outcome: Future[TokenConstraint | BatonError] = Future()
    sampling = SamplingParams(grammar=grammar)
    compiler.compile(Prompt(prompt_tokens=(1,), sampling=sampling), outcome.set_result)
    constraint = outcome.result()
    if isinstance(constraint, BatonError):
        raise constraint
    return constraint


def mask_seconds(constraint: "TokenConstraint", rng: np.random.Generator, most: int) -> list[float]:
    """Of each mask of a random answer."""
    bits, seconds = np.empty(VOCABULARY // 32, np.uint32), []
    for _ in range(most):
        begun_s = time.perf_counter()
        constraint.fill(bits)
        seconds.append(time.perf_counter() - begun_s)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        token = int(rng.choice(allowed))
        if token == _END:
            break
        constraint.accept(token)
    return seconds


class Timed:
    """A running engine, and when the tokens of its requests came.

    Args:
        built: Closed by whoever built it.
    """

    def __init__(self, built: "BuiltEngine") -> None:
        self._host = built.host
        self._host.attach(self._hear)
        self._host.start()
        self._names = (SeqId(f"bench/{number}") for number in count())
        self._came_s: list[float] = []
        self._watched: set[SeqId] = set()
        self._left = 0
        self._over = threading.Event()

    def _hear(self, told: StepEvents) -> None:
        if told.sampled is not None:
            now_s = time.perf_counter()
            self._came_s += [now_s] * sum(map(self._watched.__contains__, told.sampled.seq_ids))
            self._left -= sum(reason is not None for reason in told.sampled.finish_reasons)
            if self._left <= 0:
                self._over.set()

    def came_s(self, prompts: Sequence[Prompt], beside: Sequence[Prompt] = ()) -> list[float]:
        """When each token of `prompts` came, after they and those `beside` them were submitted together."""
        commands = [
            Generate(seq_id=next(self._names), prompt=prompt) for prompt in (*prompts, *beside)
        ]
        self._watched = {command.seq_id for command in commands[: len(prompts)]}
        self._came_s, self._left = [], len(commands)
        self._over.clear()
        begun_s = time.perf_counter()
        for command in commands:
            self._host.submit(command)
        if not self._over.wait(120.0):
            raise RuntimeError("the engine did not answer")
        return [came_s - begun_s for came_s in self._came_s]


def _prompts(number: int, tokens: int, grammar: str) -> list[Prompt]:
    sampling = SamplingParams(max_tokens=tokens, seed=number, ignore_eos=True, grammar=grammar)
    texts = [
        [2 + (71 * number + 7 * i + 31 * place) % 4000 for place in range(32)] for i in range(8)
    ]
    return [
        Prompt(prompt_tokens=tuple(text), sampling=replace(sampling, seed=number + i))
        for i, text in enumerate(texts)
    ]


def _step_s(came_s: list[float], sequences: int) -> float:
    """The mean step once all sequences decode. One in which the machine did something else, which took twice the median
    or more, counts as twice the median: masks take far less.
    """
    told_s = came_s[sequences - 1 :: sequences]
    steps_s = [after - before for before, after in pairwise(told_s[_TOKENS // 4 :])]
    longest_s = 2 * median(steps_s)
    return mean(min(step_s, longest_s) for step_s in steps_s)


def _build(directory: Path) -> "BuiltEngine":
    from baton_engine.build import build_engine

    return build_engine(
        ModelConfig(model=str(directory), max_model_len=1024),
        EngineConfig(kv_cache_memory_bytes=256 << 20),
        secret=bytes(32),
        memory=WorkerMemory(),
        sink=None,
        progress=lambda _what, _fraction: None,
        grammar=GrammarConfig(max_compiled=1),
    )


def _in_brief_thread(call: Callable[[], _T]) -> _T:
    """Calls in a thread that ends, as a worker loads its model: a thread that has computed keeps its OpenMP team, and
    with two of them their threads sleep at each of a step's barriers.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def measure(directory: Path, rounds: int, figures: dict[str, float]) -> None:
    """Fills `figures`, and tells them as they come."""
    from baton_engine.grammar import load_compiler
    from baton_engine.models.config import load_spec

    rng = Random(1)
    schemas = [schema(rng) for _ in range(_SCHEMAS)]
    grammars, check_s = asyncio.run(checked(schemas))
    form_s = asyncio.run(added_by_forms(directory, schemas))
    spec = load_spec(directory)
    compiler = load_compiler(
        directory,
        GrammarConfig(max_compiled=1),
        vocab_size=spec.vocab_size,
        eos_ids=spec.eos_token_ids,
    )
    assert compiler is not None
    compile_s, mask_s = [], []
    for number, grammar in enumerate(grammars):
        begun_s = time.perf_counter()
        constraint = compiled(compiler, grammar)
        compile_s.append(time.perf_counter() - begun_s)
        mask_s += mask_seconds(constraint, np.random.default_rng(number), 40)
    compiler.close()
    figures |= {
        "check_ms_p50": 1e3 * median(check_s),
        "router_added_ms_p50": 1e3 * median(form_s),
        "compile_ms_p50": 1e3 * median(compile_s),
        "compile_ms_p99": 1e3 * percentile(compile_s, 0.99),
        "mask_us_p50": 1e6 * median(mask_s),
        "mask_us_p99": 1e6 * percentile(mask_s, 0.99),
    }
    print(f"compiled: {figures}", flush=True)
    built = _in_brief_thread(lambda: _build(directory))
    try:
        engine = Timed(built)
        figures |= _first_tokens(engine, grammars, figures["router_added_ms_p50"])
        print(f"first tokens: {figures}", flush=True)
        figures |= _decodes(engine, rounds)
        print(f"decodes: {figures}", flush=True)
        figures |= _beside_hostile(engine, rounds)
    finally:
        built.host.close()
    print(f"beside hostile forms: {figures}", flush=True)


def _first_tokens(engine: Timed, grammars: Sequence[str], router_ms: float) -> dict[str, float]:
    free_s: list[float] = []
    constrained_s: list[float] = []
    for number in range(40):
        for grammar, seconds in (("", free_s), (grammars[number], constrained_s)):
            seconds.append(engine.came_s(_prompts(2 * number + bool(grammar), 1, grammar)[:1])[0])
    added_ms = 1e3 * (median(constrained_s) - median(free_s))
    return {
        "ttft_free_ms_p50": 1e3 * median(free_s),
        "worker_added_ms_p50": added_ms,
        "ttft_added_ms_p50": added_ms + router_ms,
    }


def _decodes(engine: Timed, rounds: int) -> dict[str, float]:
    endless = {"type": "array", "minItems": 10_000, "items": schema(Random(2), 1)}
    (grammar,), _ = asyncio.run(checked([endless]))
    half = _SEQUENCES // 2
    ratios, beside, free_s = [], [], []
    for number in range(rounds + 1):
        seconds = {}
        for kind in ("free", "held", "beside") if number % 2 else ("beside", "held", "free"):
            free, held = (_prompts(1000 + number, _TOKENS, text) for text in ("", grammar))
            asked = {"free": (free, ()), "held": (held, ()), "beside": (free[:half], held[half:])}
            prompts, others = asked[kind]
            seconds[kind] = _step_s(engine.came_s(prompts, others), len(prompts))
        if number:  # the first round warms up
            ratios.append(seconds["free"] / seconds["held"])
            beside.append(seconds["free"] / seconds["beside"])
            free_s.append(seconds["free"])
    return {
        "constrained_over_free_tok_s_b8": median(ratios),
        "constrained_over_free_least": min(ratios),
        "constrained_over_free_most": max(ratios),
        "beside_constrained_over_free_tok_s_b8": median(beside),
        "free_tok_s_b8": _SEQUENCES / median(free_s),
    }


def _beside_hostile(engine: Timed, rounds: int) -> dict[str, float]:
    """By how much longer the steps of those without a form are beside one, and beside four, of each hostile form than
    beside as many more without.
    """
    grammars, _ = asyncio.run(checked(list(_HOSTILE.values()), "regex"))
    texts = {"": "", **dict(zip(_HOSTILE, grammars, strict=True))}
    added_ms: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for held in (1, _SEQUENCES // 2):
            seconds = {}
            for kind, grammar in texts.items():
                free, beside = (_prompts(2000 + number, _TOKENS, text) for text in ("", grammar))
                left = _SEQUENCES - held
                seconds[kind] = _step_s(engine.came_s(free[:left], beside[left:]), left)
            for kind in _HOSTILE if number else ():  # the first round warms up
                added = added_ms.setdefault(f"hostile_{kind}_{held}_added_step_ms", [])
                added.append(1e3 * (seconds[kind] - seconds[""]))
    return {name: median(added) for name, added in added_ms.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama116m")
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args(argv)
    settings = {"shape": arguments.shape, "rounds": arguments.rounds, "vocabulary": VOCABULARY}
    report = Report(benchmark="structured", settings=settings)
    with (
        report.written_to(arguments.json),
        tempfile.TemporaryDirectory(prefix="baton-bench-") as directory,
    ):
        shape = replace(SHAPES[arguments.shape], vocab=VOCABULARY)
        _in_brief_thread(lambda: write_model(shape, Path(directory)))
        write_tokenizer(Path(directory), VOCABULARY)
        measure(Path(directory), arguments.rounds, report.figures)


if __name__ == "__main__":
    main()
