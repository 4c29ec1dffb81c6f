"""Grammars inside vLLM, with vLLM's own classes and a constraint that is told what to do."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from baton.errors import BatonError, EngineError, InvalidRequestError
from baton.generation import Prompt, SamplingParams
from baton_engine.ports import TokenConstraint
from baton_vllm.settings import missing

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # of torch and vLLM, while they are imported
    pytest.mark.timeout(120),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

PROMPT = Prompt(prompt_tokens=(1, 2), sampling=SamplingParams(grammar="start: /a/"))


class Constraint:
    def __init__(self) -> None:
        self.accepted: list[int] = []
        self.fault: BatonError | None = None

    def accept(self, token: int) -> None:
        self.accepted.append(token)

    def fork(self) -> "Constraint":
        return self

    def fork_for_draft(self, token: int) -> "Constraint":
        return self

    def begin(self, *, late: bool = False) -> None:
        pass

    def finding(self, within_s: float = 0.0) -> bool:
        return False

    def num_allowed(self, tokens: Sequence[int]) -> int:
        return len(tokens)

    def fill(self, bits: np.ndarray) -> None:
        bits[:] = 0
        bits[1] = 1 << 31


class Compiler:
    def __init__(self, outcome: TokenConstraint | BatonError) -> None:
        self.outcome = outcome

    def find_masks_beside(self, told: Callable[[], None]) -> None:
        pass

    def compile(self, prompt: Prompt, done: Callable[[TokenConstraint | BatonError], None]) -> None:
        assert prompt == PROMPT
        done(self.outcome)

    def close(self) -> None:
        pass


def held(outcome: TokenConstraint | BatonError):
    from vllm.sampling_params import SamplingParams as VllmSampling
    from vllm.v1.request import Request

    from baton_vllm.grammar import hold

    request = Request("r", [1, 2], VllmSampling(max_tokens=4), None)
    hold(request, PROMPT, Compiler(outcome))
    return request


def test_a_request_waits_for_its_grammar_and_then_has_it():
    from vllm.v1.request import RequestStatus

    constraint = Constraint()
    request = held(constraint)
    assert request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    assert request.use_structured_output
    grammar = request.structured_output_request.grammar
    assert grammar.accept_tokens("r", [7, 8])
    assert constraint.accepted == [7, 8]


def test_a_mask_is_written_into_the_row_of_the_request():
    from baton_vllm.grammar import new_masks

    masks = new_masks(3, 70)
    held(Constraint()).structured_output_request.grammar.fill_bitmask(masks, 1)
    assert masks[0].tolist() == masks[2].tolist() == [-1, -1, -1]
    assert masks[1].tolist() == [0, -(2**31), 0]


def test_an_output_that_cannot_go_on_is_ended_and_not_taken_for_complete():
    from baton_vllm.core import _fault

    constraint = Constraint()
    request = held(constraint)
    constraint.fault = InvalidRequestError("too complex")
    assert not request.structured_output_request.grammar.accept_tokens("r", [7])
    assert constraint.accepted == []
    assert _fault(request.structured_output_request) is constraint.fault


def test_a_grammar_that_cannot_be_compiled_is_why_its_request_ends():
    from baton_vllm.core import _fault

    error = InvalidRequestError("no such token")
    request = held(error)
    assert request.structured_output_request.is_grammar_ready
    assert _fault(request.structured_output_request) is error
    assert isinstance(_fault(None), EngineError)
