"""What the engine's thread needs of vLLM's core, one step after the other (`baton_vllm.core` has the real one)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.errors import BatonError
from baton.generation import FinishReason, TokenLogprobs
from baton_vllm.requests import CoreRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """What vLLM's scheduler has put into the step that begins.

    Attributes:
        started: Requests of which a first token is computed, with how many leading tokens its prefix cache had.
        resumed: How many go on that were preempted.
        num_sequences: Requests in the step.
        num_tokens: Tokens that it computes.
        context_tokens: Tokens that stand before those, over all requests.
        is_idle: Whether nothing is computed, nor would be in a step after this one, unless something is told to vLLM.
    """

    started: tuple[tuple[str, int], ...] = ()
    resumed: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    context_tokens: int = 0
    is_idle: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreOutput:
    """What one step has drawn for one request.

    Attributes:
        request_id: Which.
        tokens: Drawn tokens, none where it only ends.
        finish: Why it ends with the last of them; None where it goes on.
        failed: What went wrong with it alone; None for nothing.
        logprobs: Of each token, where they were asked for.
        prompt_logprobs: With the first token where they were asked for: of the prompt's tokens from the second on.
    """

    request_id: str
    tokens: Sequence[int]
    finish: FinishReason | None = None
    failed: BatonError | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLoad:
    """vLLM's counts between two steps.

    Attributes:
        running: Requests that run.
        waiting: Those that wait.
        blocks_total: Pages that it hands out.
        blocks_free: Pages that no request uses; some hold blocks that can be found again.
    """

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0


class RankMemory(Protocol):
    """Where one rank's pages lie: the worker's memory, of which the rank gets the descriptor."""

    def allocate_shared(self, size_bytes: int) -> int:
        """Zeroed bytes that stay valid until the process ends; the descriptor of a file that holds them, which stays this
        object's. One call per arena.

        Raises:
            OutOfMemoryError: This machine has not got them.
        """


class CorePort(Protocol):
    """vLLM's core. One thread uses it."""

    def add(self, request: CoreRequest) -> None:
        """Queues a request.

        Raises:
            InvalidRequestError: vLLM refuses it.
            UnsupportedParameterError: It has a grammar, and the model's tokenizer is none that can be held to one.
        """

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests; right for unknown ones. They are not heard of again."""

    def go_on(self, request_id: str, token: int) -> None:
        """A request that waits for its prompt's KV is to go on from `token`, the first one behind its prompt."""

    def bind(self, cores: Sequence[int]) -> None:
        """Processes of its own are to run on these cores."""

    def has_work(self) -> bool:
        """Whether it has requests, be it that they wait for something."""

    def step(self, scheduled: Callable[[Scheduled], None]) -> Sequence[CoreOutput]:
        """Computes one step, which may be an empty one. `scheduled` is called before the model runs.

        Raises:
            Exception: vLLM is broken, and no further step can be trusted.
        """

    def flush(self) -> None:
        """Forgets every block that no request uses."""

    def load(self) -> CoreLoad:
        """Its counts."""

    def close(self) -> None:
        """Gives back what it holds."""
