"""Holds vLLM's outputs to grammars with Baton's own compiler, as a backend of vLLM's structured output.

vLLM's backends have no limits on what a grammar may cost, end a text whose grammar has become too complex as if it were complete, and
know nothing of an output that was begun elsewhere. With this one a request gives the same answers and errors as with Baton's engine.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
)

from baton.config.schema import GrammarConfig
from baton.errors import BatonError, InvariantError
from baton_engine.grammar import MatcherCompiler
from baton_engine.ports import TokenConstraint


class HeldGrammar(StructuredOutputGrammar):
    """The grammar of one request. vLLM asks for a mask before each token, and tells the token."""

    def __init__(self, constraint: TokenConstraint) -> None:
        self._constraint = constraint

    @property
    def fault(self) -> BatonError | None:
        """Why the output cannot go on; None while it can."""
        return self._constraint.fault

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:  # noqa: ARG002
        """False, which ends the request with an error, also where the mask before the token could not be computed."""
        if self.fault is None:
            for token in tokens:
                self._constraint.accept(token)
        return self.fault is None

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """See StructuredOutputGrammar: one bit per token, in words of 32."""
        self._constraint.fill(bitmask[batch_index].numpy().view(np.uint32))

    def is_terminated(self) -> bool:
        """Never: a complete output allows a token that ends it and no other, and that token ends the request."""
        return False

    def validate_tokens(self, tokens: list[int]) -> list[int]:  # noqa: ARG002
        """Asked of drafts only."""
        raise InvariantError("vLLM drafts no tokens here")

    def rollback(self, num_tokens: int) -> None:  # noqa: ARG002
        """Asked of drafts only."""
        raise InvariantError("vLLM drafts no tokens here")

    def reset(self) -> None:
        """Asked by nobody."""
        raise InvariantError("a grammar is not begun again")


class GrammarBackend(StructuredOutputBackend):
    """Compiles grammars in threads of its own.

    Args:
        vllm_config: vLLM's.
        compiler: Baton's, for the model's tokenizer.
        config: How many threads.
        vocab_size: How many tokens the model scores.

    Attributes:
        executor: The threads.
    """

    def __init__(
        self, vllm_config: Any, compiler: MatcherCompiler, config: GrammarConfig, vocab_size: int
    ) -> None:
        super().__init__(vllm_config, None, vocab_size)
        self._compiler = compiler
        self.executor = ThreadPoolExecutor(config.threads, thread_name_prefix="grammar")

    @staticmethod
    def asked(grammar: str, drawn: Sequence[int]) -> StructuredOutputsParams:
        """What a request says to vLLM: the grammar, and what of the output is there already."""
        return StructuredOutputsParams(grammar=json.dumps([grammar, list(drawn)]))

    def compile_grammar(
        self,
        request_type: object,  # noqa: ARG002
        grammar_spec: str,
        stop_token_ids: set[int] | None = None,  # noqa: ARG002
    ) -> HeldGrammar:
        """Compiles what `asked` made.

        Raises:
            BatonError: The grammar cannot be compiled, or is too complex.
        """
        grammar, drawn = json.loads(grammar_spec)
        constraint = self._compiler.compiled(grammar, drawn)
        if isinstance(constraint, BatonError):
            raise constraint
        return HeldGrammar(constraint)

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        """Every token allowed. [max_num_seqs, words of 32 tokens], int32."""
        return torch.full((max_num_seqs, -(-self.vocab_size // 32)), -1, dtype=torch.int32)

    def destroy(self) -> None:
        """Ends the threads."""
        self.executor.shutdown(wait=True, cancel_futures=True)
        self._compiler.close()
