"""Holds outputs to grammars, by llguidance: compiles what a request brings, and says at each step which tokens may come next.

    compile (threads of its own)       accept (engine loop)        fill (while the model computes the next scores)
    grammar, output so far  ────────▶  each drawn token  ────────▶  one bit per token of the vocabulary

A grammar is compiled once and kept; each sample has a copy of its own that shares what was compiled. What a copy has read is a
function of its tokens, so no state of it ever crosses a wire: each worker reads the output from its beginning.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from time import perf_counter

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from baton.config.schema import GrammarConfig
from baton.errors import BatonError, EngineError, InvalidRequestError, ModelLoadError
from baton.generation import Prompt
from baton.grammar import parser_limits, reason_of
from baton.pretrained import read_tokenizer
from baton_engine.ports import GrammarCounts, TokenConstraint

logger = logging.getLogger(__name__)


class MatcherConstraint:
    """A `TokenConstraint` by one of llguidance's matchers. Nothing is raised: whatever goes wrong is its `fault`.

    Args:
        matcher: Has read the sample's output so far.
        vocab_size: Of the matcher's tokenizer.
        counts: Of the worker.
    """

    __slots__ = ("_counts", "_fault", "_mask_bytes", "_matcher", "_vocab_size")

    def __init__(self, matcher: LLMatcher, vocab_size: int, counts: GrammarCounts) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._mask_bytes = 4 * -(-vocab_size // 32)
        self._counts = counts
        self._fault: BatonError | None = None

    def accept(self, token: int) -> None:
        """See TokenConstraint."""
        try:
            self._matcher.consume_token(token)
        except BaseException as error:  # noqa: BLE001 - a panic of Rust's is no Exception
            self._break(error)

    def fork(self) -> "MatcherConstraint":
        """See TokenConstraint."""
        return MatcherConstraint(self._matcher.deep_copy(), self._vocab_size, self._counts)

    def fill(self, bits: NDArray[np.uint32]) -> None:
        """See TokenConstraint. Written in place where the tokenizer knows no more tokens than the model has scores for."""
        begun_s = perf_counter()
        try:
            if bits.nbytes == self._mask_bytes:
                self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, self._mask_bytes)
            else:
                bits[:] = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: len(bits)]
        except BaseException as error:  # noqa: BLE001 - likewise
            self._break(error)
        self._counts.masks += 1
        self._counts.mask_s += perf_counter() - begun_s

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """See TokenConstraint."""
        if self.fault is not None:
            return 0
        try:
            return self._matcher.validate_tokens(list(tokens))
        except BaseException as error:  # noqa: BLE001 - likewise
            self._break(error)
            return 0

    @property
    def fault(self) -> BatonError | None:
        """See TokenConstraint."""
        if self._fault is None and self._matcher.is_error():
            self._fault = _not_held(self._matcher)
            self._counts.faults += 1
        return self._fault

    def _break(self, error: BaseException) -> None:
        logger.error("a matcher broke", exc_info=error)
        if self._fault is None:
            self._fault = EngineError(f"the grammar's matcher broke: {type(error).__name__}")
            self._counts.faults += 1


def _not_held(matcher: LLMatcher) -> InvalidRequestError:
    reason = reason_of(matcher.get_error())
    return InvalidRequestError(f"the output cannot be held to its grammar: {reason}")


class MatcherCompiler:
    """A `GrammarCompiler` by llguidance, for one tokenizer.

    Of each tenant one grammar at a time is with the threads, and those of several tenants in the order in which they got there: who
    sends many waits for them itself.

    Args:
        tokenizer: The model's; its vocabulary is at least as large as that of the scores.
        config: What a grammar may cost, and how many are kept.

    Attributes:
        counts: What was compiled, and what that and the masks took.
    """

    def __init__(self, tokenizer: LLTokenizer, config: GrammarConfig) -> None:
        self._tokenizer = tokenizer
        self._limits = parser_limits(config)
        self._max_kept = config.max_compiled
        self._kept: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self.counts = GrammarCounts()
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(config.threads, thread_name_prefix="grammar")
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        """By tenant, behind the one that is with the threads."""

    def compile(self, prompt: Prompt, done: Callable[[TokenConstraint | BatonError], None]) -> None:
        """See GrammarCompiler."""

        def work() -> None:
            done(self._compiled(prompt))

        with self._lock:
            if (behind := self._waiting.get(prompt.tenant)) is not None:
                behind.append(work)
                return
            self._waiting[prompt.tenant] = deque()
        self._pool.submit(self._take_turn, prompt.tenant, work)

    def close(self) -> None:
        """See GrammarCompiler."""
        with self._lock:
            for behind in self._waiting.values():
                behind.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _take_turn(self, tenant: str, work: Callable[[], None]) -> None:
        work()
        with self._lock:
            if not (behind := self._waiting[tenant]):
                del self._waiting[tenant]
                return
            following = behind.popleft()
        self._pool.submit(self._take_turn, tenant, following)

    def _compiled(self, prompt: Prompt) -> TokenConstraint | BatonError:
        begun_s = perf_counter()
        try:
            outcome = self._constraint(prompt)
        except BaseException as error:  # a panic of Rust's is no Exception
            logger.exception("a grammar could not be compiled")
            outcome = EngineError(f"the grammar could not be compiled: {type(error).__name__}")
        with self._lock:
            self.counts.compile_s += perf_counter() - begun_s
            self.counts.refused += isinstance(outcome, BatonError)
        return outcome

    def _constraint(self, prompt: Prompt) -> TokenConstraint | BatonError:
        matcher = self._matcher(prompt.sampling.grammar)
        for token in prompt.output_tokens:
            matcher.consume_token(token)
        # The first mask, here already: a grammar too complex for it is refused before any step computes for it.
        matcher.compute_bitmask()
        if matcher.is_error():
            return _not_held(matcher)
        return MatcherConstraint(matcher, self._tokenizer.vocab_size, self.counts)

    def _matcher(self, grammar: str) -> LLMatcher:
        """A fresh copy, at the beginning of an output."""
        digest = blake2b(grammar.encode(), digest_size=16).digest()
        with self._lock:
            if (kept := self._kept.get(digest)) is not None:
                self._kept.move_to_end(digest)
                self.counts.found += 1
                return kept.deep_copy()
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            return matcher
        copy = matcher.deep_copy()
        with self._lock:
            self.counts.compiled += 1
            self._kept[digest] = matcher
            if len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)
                self.counts.evicted += 1
        return copy


def load_compiler(
    directory: Path, config: GrammarConfig, *, vocab_size: int, eos_ids: Sequence[int]
) -> MatcherCompiler | None:
    """The compiler for a model's tokenizer. None where it has none that llguidance reads, or no token that ends a text: then grammars
    are refused. Blocks.

    Args:
        directory: The model's.
        config: What a grammar may cost.
        vocab_size: How many tokens the model scores.
        eos_ids: Those that end a text.
    """
    if not eos_ids:
        logger.warning("grammars are refused: no token of this model ends a text")
        return None
    try:
        backend = read_tokenizer(directory).backend
        backend.no_truncation()
        backend.no_padding()
        num_known = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        tokenizer = LLTokenizer(
            backend.to_str(),
            n_vocab=max(vocab_size, num_known),
            eos_token=list(eos_ids),
        )
    except (ModelLoadError, ValueError) as error:
        logger.warning("grammars are refused, the tokenizer is of no use for them: %s", error)
        return None
    return MatcherCompiler(tokenizer, config)
