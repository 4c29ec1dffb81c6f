"""Holds outputs to grammars, by llguidance: compiles what a request brings. A `MatcherConstraint` says at each step
which tokens may come next.

    compile (threads of its own)       accept (engine loop)        find (while the model computes the next scores)
    grammar, output so far  ────────▶  each drawn token  ────────▶  one bit per token of the vocabulary

A grammar is compiled once and kept; each sample has a copy of its own that shares what was compiled. What a copy has
read is a function of its tokens, so no state of it ever crosses a wire: each worker reads the output from its
beginning.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from threading import Barrier, Lock, stack_size
from time import perf_counter, thread_time

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from baton.config.schema import GrammarConfig
from baton.errors import BatonError, EngineError, ModelLoadError
from baton.generation import Prompt
from baton.grammar import COMPILE_STACK_BYTES, parser_limits
from baton.pretrained import PretrainedTokenizer, read_tokenizer
from baton.tenant_cache import TenantCache
from baton_engine.matcher import CompiledGrammar, MaskThreads, MatcherConstraint, refusal_of
from baton_engine.ports import GrammarCounts, TokenConstraint

logger = logging.getLogger(__name__)

MAX_KEPT_S = 4.0
"""Of a core's time, that compiling the grammars that are kept and finding their masks has taken. llguidance does not
tell what memory they have; a second of its work leaves 200 MiB at most, of hostile ones 30 to 150.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Job:
    """The grammar of one prompt, which waits for a thread; `digest` names the grammar."""

    prompt: Prompt
    digest: bytes
    done: Callable[[TokenConstraint | BatonError], None]


@dataclass(slots=True, eq=False)
class _TenantJobs:
    """Those of one tenant: whose grammar is compiled already, the others, and how many are with the threads."""

    compiled: deque[_Job] = field(default_factory=deque)
    new: deque[_Job] = field(default_factory=deque)
    num_running: int = 0


class _JobQueue:
    """Grammars that wait for a thread, and whose turn it is: of the tenants that wait, the one with the fewest on
    threads; of several such, the one whose turn was longest ago. Not thread-safe.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _TenantJobs] = {}  # whose turn was longest ago first

    def put(self, job: _Job, *, is_compiled: bool) -> None:
        """Adds one; those whose grammar is compiled already go before the same tenant's others."""
        tenant = self._tenants.setdefault(job.prompt.tenant, _TenantJobs())
        (tenant.compiled if is_compiled else tenant.new).append(job)

    def take(self) -> _Job | None:
        """The next one, for a thread; None where none waits."""
        waiting = [name for name, tenant in self._tenants.items() if tenant.compiled or tenant.new]
        if not waiting:
            return None
        name = min(waiting, key=lambda name: self._tenants[name].num_running)
        tenant = self._tenants[name] = self._tenants.pop(name)
        tenant.num_running += 1
        return (tenant.compiled or tenant.new).popleft()

    def over(self, job: _Job) -> None:
        """A thread is through with it."""
        tenant = self._tenants[job.prompt.tenant]
        tenant.num_running -= 1
        if not (tenant.num_running or tenant.compiled or tenant.new):
            del self._tenants[job.prompt.tenant]

    def clear(self) -> None:
        """Nothing waits any more."""
        for tenant in self._tenants.values():
            tenant.compiled.clear()
            tenant.new.clear()


class MatcherCompiler:
    """A `GrammarCompiler` by llguidance, for one tokenizer.

    A tenant has all threads while no other waits; then they take turns. Who asks for a grammar that a thread is
    compiling waits for that, without a thread, so that it is compiled once.

    Args:
        tokenizer: The model's; its vocabulary is at least as large as that of the scores.
        config: What a grammar may cost, and how many are kept.

    Attributes:
        counts: What was compiled, and what that and the masks took.
    """

    def __init__(self, tokenizer: LLTokenizer, config: GrammarConfig) -> None:
        self._tokenizer = tokenizer
        self._limits = parser_limits(config)
        self._kept = TenantCache[bytes, tuple[LLMatcher, CompiledGrammar]](config.max_compiled)
        self.counts = GrammarCounts()
        self._masks = MaskThreads()
        self._lock = Lock()
        self._num_threads = config.threads
        self._num_working = 0
        self._pool = _deep_threads(config.threads)
        self._waiting = _JobQueue()
        self._compiling: dict[bytes, list[_Job]] = {}
        """By digest of a grammar that a thread compiles: others that want it."""

    def compile(self, prompt: Prompt, done: Callable[[TokenConstraint | BatonError], None]) -> None:
        """See GrammarCompiler."""
        digest = blake2b(prompt.sampling.grammar.encode(), digest_size=16).digest()
        with self._lock:
            job = _Job(prompt=prompt, digest=digest, done=done)
            self._waiting.put(job, is_compiled=digest in self._kept)
            if self._num_working == self._num_threads:
                return
            self._num_working += 1
        self._pool.submit(self._work)

    def find_masks_beside(self, told: Callable[[], None]) -> None:
        """See GrammarCompiler."""
        self._masks.start(told)

    def close(self) -> None:
        """See GrammarCompiler."""
        self._masks.close()
        with self._lock:
            self._waiting.clear()
            self._compiling.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _work(self) -> None:
        """What a thread does: one grammar after the other, until none waits."""
        job = self._next(None)
        while job is not None:
            try:
                job.done(self._compiled(job))
            except BaseException:
                logger.exception("a request could not be told of its grammar")
            job = self._next(job)

    def _next(self, last: _Job | None) -> _Job | None:
        """The next one for a thread that is through with `last`, whose tenant has its turn after the others'."""
        with self._lock:
            if last is not None:
                for job in self._compiling.pop(last.digest, ()):
                    self._waiting.put(job, is_compiled=True)
            found = self._take()
            if last is not None:
                self._waiting.over(last)
            self._num_working -= found is None
            return found

    def _take(self) -> _Job | None:
        while (job := self._waiting.take()) is not None:
            if (others := self._compiling.get(job.digest)) is None:
                if job.digest not in self._kept:
                    self._compiling[job.digest] = []
                return job
            others.append(job)
            self._waiting.over(job)
        return None

    def _compiled(self, job: _Job) -> TokenConstraint | BatonError:
        begun_s = perf_counter()
        try:
            outcome = self._constraint(job)
        except BaseException as error:  # a panic of Rust's is no Exception
            logger.exception("a grammar could not be compiled")
            outcome = EngineError(f"the grammar could not be compiled: {type(error).__name__}")
        with self._lock:
            self.counts.compile_s += perf_counter() - begun_s
            self.counts.refused += isinstance(outcome, BatonError)
        return outcome

    def _constraint(self, job: _Job) -> TokenConstraint | BatonError:
        prompt = job.prompt
        is_kept = True
        while is_kept:
            begun_s = thread_time()
            matcher, grammar, is_kept = self._matcher(job)
            for token in prompt.output_tokens:
                matcher.consume_token(token)
            # The first mask, here already: a grammar too complex for it is refused before any step computes for it.
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)
            grammar.spend(thread_time() - begun_s)
            if not matcher.is_error():
                return MatcherConstraint(matcher, grammar, mask)
            grammar.forget()  # one that was kept may have been used up by others
        return refusal_of(matcher)

    def _matcher(self, job: _Job) -> tuple[LLMatcher, CompiledGrammar, bool]:
        """A fresh copy, at the beginning of an output; its grammar; and whether that was kept."""
        with self._lock:
            if (kept := self._kept.get(job.digest)) is not None:
                self.counts.found += 1
                return kept[0].deep_copy(), kept[1], True
        text = job.prompt.sampling.grammar
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        grammar = CompiledGrammar(
            vocab_size=self._tokenizer.vocab_size,
            counts=self.counts,
            threads=self._masks,
            forget=partial(self._forget, job.digest),
            grown=self._shrink,
        )
        if matcher.is_error():
            return matcher, grammar, False
        copy = matcher.deep_copy()
        with self._lock:
            self.counts.compiled += 1
            kept = matcher, grammar
            self.counts.evicted += self._kept.put(job.digest, kept, job.prompt.tenant)
        return copy, grammar, False

    def _shrink(self) -> None:
        """Keeps no more than may be kept, after a grammar has taken more time."""
        with self._lock:
            self.counts.evicted += self._kept.shrink(lambda kept: kept[1].spent_s, MAX_KEPT_S)

    def _forget(self, digest: bytes) -> None:
        with self._lock:
            self._kept.pop(digest)


def _deep_threads(count: int) -> ThreadPoolExecutor:
    """Threads on which grammars may be compiled that a router has checked: they have started, each with its stack."""
    threads = ThreadPoolExecutor(count, thread_name_prefix="grammar")
    all_run = Barrier(count + 1)
    usual = stack_size(COMPILE_STACK_BYTES)  # of every thread that starts meanwhile
    try:
        for _ in range(count):
            threads.submit(all_run.wait)
        all_run.wait()
    except BaseException:
        all_run.abort()
        raise
    finally:
        stack_size(usual)
    return threads


def load_compiler(
    directory: Path, config: GrammarConfig, *, vocab_size: int, eos_ids: Sequence[int]
) -> MatcherCompiler | None:
    """The compiler for a model's tokenizer. None where it has none that llguidance reads, or no token that ends a text:
    then grammars are refused. Blocks.

    Args:
        directory: The model's.
        config: What a grammar may cost.
        vocab_size: How many tokens the model scores.
        eos_ids: Those that end a text.
    """
    try:
        tokenizer = read_tokenizer(directory)
    except ModelLoadError as error:
        logger.warning("grammars are refused, there is no tokenizer for them: %s", error)
        return None
    return make_compiler(tokenizer, config, vocab_size=vocab_size, eos_ids=eos_ids)


def make_compiler(
    pretrained: PretrainedTokenizer,
    config: GrammarConfig,
    *,
    vocab_size: int,
    eos_ids: Sequence[int],
) -> MatcherCompiler | None:
    """As `load_compiler`, where the tokenizer has been read; it is the compiler's from then on."""
    if not eos_ids:
        logger.warning("grammars are refused: no token of this model ends a text")
        return None
    backend = pretrained.backend
    try:
        backend.no_truncation()
        backend.no_padding()
        num_known = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        tokenizer = LLTokenizer(
            backend.to_str(),
            n_vocab=max(vocab_size, num_known),
            eos_token=list(eos_ids),
        )
    except ValueError as error:
        logger.warning("grammars are refused, the tokenizer is of no use for them: %s", error)
        return None
    return MatcherCompiler(tokenizer, config)
