"""Holds outputs to grammars, by llguidance: compiles what a request brings, and says at each step which tokens may come next.

    compile (threads of its own)       accept (engine loop)        fill (while the model computes the next scores)
    grammar, output so far  ────────▶  each drawn token  ────────▶  one bit per token of the vocabulary

A grammar is compiled once and kept; each sample has a copy of its own that shares what was compiled. What a copy has read is a
function of its tokens, so no state of it ever crosses a wire: each worker reads the output from its beginning.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from threading import Lock

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from baton.config.schema import GrammarConfig
from baton.errors import BatonError, EngineError, InvalidRequestError, ModelLoadError
from baton.generation import Prompt
from baton.grammar import parser_limits, reason_of
from baton.pretrained import read_tokenizer
from baton_engine.ports import TokenConstraint

logger = logging.getLogger(__name__)


class MatcherConstraint:
    """A `TokenConstraint` by one of llguidance's matchers.

    Args:
        matcher: Has read the sample's output so far.
        vocab_size: Of the matcher's tokenizer.
    """

    __slots__ = ("_mask_bytes", "_matcher", "_vocab_size")

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._mask_bytes = 4 * -(-vocab_size // 32)

    def accept(self, token: int) -> None:
        """See TokenConstraint."""
        self._matcher.consume_token(token)

    def fork(self) -> "MatcherConstraint":
        """See TokenConstraint."""
        return MatcherConstraint(self._matcher.deep_copy(), self._vocab_size)

    def fill(self, bits: NDArray[np.uint32]) -> None:
        """See TokenConstraint. Written in place where the tokenizer knows no more tokens than the model has scores for."""
        if bits.nbytes == self._mask_bytes:
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, self._mask_bytes)
        else:
            bits[:] = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: len(bits)]

    @property
    def fault(self) -> BatonError | None:
        """See TokenConstraint."""
        if not self._matcher.is_error():
            return None
        reason = reason_of(self._matcher.get_error())
        return InvalidRequestError(f"the output cannot be held to its grammar: {reason}")


class MatcherCompiler:
    """A `GrammarCompiler` by llguidance, for one tokenizer.

    Args:
        tokenizer: The model's; its vocabulary is at least as large as that of the scores.
        config: What a grammar may cost, and how many are kept.

    Attributes:
        num_compiled: Grammars that were compiled, or refused.
        num_found: Those that were kept from before.
    """

    def __init__(self, tokenizer: LLTokenizer, config: GrammarConfig) -> None:
        self._tokenizer = tokenizer
        self._limits = parser_limits(config)
        self._max_kept = config.max_compiled
        self._kept: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self.num_compiled = 0
        self.num_found = 0
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(config.threads, thread_name_prefix="grammar")

    def compile(self, prompt: Prompt, done: Callable[[TokenConstraint | BatonError], None]) -> None:
        """See GrammarCompiler."""
        grammar, output = prompt.sampling.grammar, prompt.output_tokens
        self._pool.submit(lambda: done(self.compiled(grammar, output)))

    def close(self) -> None:
        """See GrammarCompiler."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def compiled(self, grammar: str, output: Sequence[int]) -> TokenConstraint | BatonError:
        """What `compile` tells, in the thread of the caller. Blocks.

        Args:
            grammar: The grammar.
            output: What was drawn before, elsewhere.
        """
        try:
            constraint = MatcherConstraint(self._matcher(grammar), self._tokenizer.vocab_size)
            for token in output:
                constraint.accept(token)
            # The first mask, here already: a grammar too complex for it is refused before any step computes for it.
            constraint.fill(np.empty(-(-self._tokenizer.vocab_size // 32), np.uint32))
            return constraint.fault or constraint
        except Exception as error:
            logger.exception("a grammar could not be compiled")
            return EngineError(f"the grammar could not be compiled: {type(error).__name__}")

    def _matcher(self, grammar: str) -> LLMatcher:
        """A fresh copy, at the beginning of an output."""
        digest = blake2b(grammar.encode(), digest_size=16).digest()
        with self._lock:
            if (kept := self._kept.get(digest)) is not None:
                self._kept.move_to_end(digest)
                self.num_found += 1
                return kept.deep_copy()
            self.num_compiled += 1
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            return matcher
        copy = matcher.deep_copy()
        with self._lock:
            self._kept[digest] = matcher
            if len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)
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
