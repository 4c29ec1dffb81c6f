"""Holds vLLM's outputs to grammars with Baton's own compiler, where vLLM's structured output has its own ones.

Those have no limits on what a grammar may cost, end a text whose grammar has become too complex as if it were complete,
and know nothing of an output that was begun elsewhere.
This way a request gives the same answers and errors as with Baton's engine.
"""

from concurrent.futures import Future

import numpy as np
import torch
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest

from baton.errors import BatonError, InvariantError
from baton.generation import Prompt
from baton_engine.ports import GrammarCompiler, TokenConstraint


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


def hold(request: Request, prompt: Prompt, compiler: GrammarCompiler) -> None:
    """Has `request` wait in vLLM's scheduler until the grammar of `prompt` is compiled, and follow it then.

    Args:
        request: Has not been added yet.
        prompt: With its output so far.
        compiler: Tells of it in a thread of its own.
    """
    outcome: Future[StructuredOutputGrammar] = Future()

    def compiled(constraint: TokenConstraint | BatonError) -> None:
        if isinstance(constraint, BatonError):
            outcome.set_exception(constraint)
        else:
            outcome.set_result(HeldGrammar(constraint))

    held = StructuredOutputRequest(StructuredOutputsParams(grammar=prompt.sampling.grammar))
    held.grammar = outcome
    request.structured_output_request = held
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    compiler.compile(prompt, compiled)


def new_masks(num_rows: int, vocab_size: int) -> torch.Tensor:
    """Masks that allow every token. `[num_rows, words of 32 tokens]` int32."""
    return torch.full((num_rows, -(-vocab_size // 32)), -1, dtype=torch.int32)
