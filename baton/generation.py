"""What is asked of a model and what it gives back, as every process speaks of it.

The router makes `SamplingParams` from a client's JSON (and checks ranges there), the engine obeys them, and both carry
`TokenSample`s. Nothing here knows of HTTP, protobuf or torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import islice

from baton.tokens import NO_TOKENS, PackedTokens, Tokens


class FinishReason(Enum):
    """Why a sample ended; the values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class EarlyStopping(Enum):
    """When a beam search is over before its beams are as long as they may be, once as many texts have ended as there
    are beams. The values are transformers'.
    """

    HEURISTIC = "false"  # no beam scores more at its present length than the worst of them
    ALWAYS = "true"  # at once
    NEVER = "never"  # no beam can ever score more than the worst of them


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How the likeliest texts are searched for.

    Attributes:
        length_penalty: A text's score is the sum of its tokens' log-probabilities,
            divided by their number to this power.
        early_stopping: When the search ends.
    """

    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn.

    Attributes:
        temperature: 0 is greedy.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches top_p; 1 keeps all.
        min_p: Drop tokens less likely than min_p times the likeliest; 0 drops none.
        presence_penalty: Subtracted once from the logit of each token generated before.
        frequency_penalty: Subtracted per occurrence among generated tokens.
        repetition_penalty: Divides (multiplies, if negative) the logits of tokens in prompt or output; 1 is off.
        seed: Always set, so that retries and migrations draw the same tokens. A draw depends on (seed, sample,
            position) and never on the batch.
        logit_bias: Token id to a number added to its logit.
        logprobs: None for none; k for the drawn token's and the k likeliest tokens' log-probabilities of the model
            itself (before penalties and temperature).
        prompt_logprobs: The same for the prompt's own tokens, from the second on; None for none. Such a prompt is
            computed as a whole, past the prefix cache.
        stop_token_ids: Generation ends after one of these, besides the model's own end-of-sequence ids.
        max_tokens: Generated tokens at most.
        min_tokens: End-of-sequence and stop ids cannot be drawn before this many generated tokens.
        ignore_eos: The model's end-of-sequence ids do not end generation. Not where there is a grammar:
            they end what is complete.
        allowed_token_ids: Only these can be drawn, each of them once and ascending; empty for all.
        bad_words: Token sequences that the output does not hold: the last token of one cannot be drawn behind the
            others. Where that, or `min_tokens`, would leave none of `allowed_token_ids` or of `grammar`,
            both give way for that token.
        grammar: What the output must follow, as llguidance writes grammars; empty for anything.
        beam_search: The samples are the likeliest texts that a search with as many beams finds, the likeliest first,
            and nothing is drawn; all their tokens are told when it ends. None where tokens are drawn.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    allowed_token_ids: PackedTokens = NO_TOKENS
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""
    beam_search: BeamSearchParams | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the model itself.

    The likeliest tokens stand in columns: a pair for each would be one more object that Python's garbage collector
    looks at, of which a request may have half a million.

    Attributes:
        logprob: Of the drawn token, or of the prompt's.
        rank: 1 for the likeliest token.
        top_tokens: Ids, likeliest first.
        top_logprobs: Of these.
    """

    logprob: float
    rank: int
    top_tokens: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()

    def top(self, count: int) -> Iterator[tuple[int, float]]:
        """(token id, logprob) of the `count` likeliest that are known, likeliest first."""
        return islice(zip(self.top_tokens, self.top_logprobs, strict=True), count)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSample:
    """One drawn token of one sample. `finish` is set on the last one."""

    sample: int
    token: int
    logprobs: TokenLogprobs | None = None
    finish: FinishReason | None = None


@lru_cache(maxsize=1 << 18)
def plain_token(sample: int, token: int) -> TokenSample:
    """A token of which there is no more to say. Most are, and the same ones come again and again:
    they are made once.
    """
    return TokenSample(sample=sample, token=token)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloTargets:
    """The service-level objectives of a request, as far as the worker that serves it can meet them.

    Attributes:
        ttft_s: Time to first token, counted from when the worker receives the request; None for no target.
        tbt_s: Time between tokens; likewise.
        priority: Higher goes first.
    """

    ttft_s: float | None = None
    tbt_s: float | None = None
    priority: int = 1


NO_SLO = SloTargets()
"""Of requests without targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt and what is drawn from it.

    Attributes:
        prompt_tokens: Token ids, at least one.
        output_tokens: Generated before, elsewhere (resumption); only with a single sample.
        samples: Sample indices to draw, each its own random stream.
        sampling: How.
        cache_scope: Tenant scope of the prefix cache.
        tenant: The tenant billed for the blocks that are kept of it.
        adapter: Name of the LoRA adapter that computes it; empty for the model alone.
        slo: The targets that the worker schedules for.
    """

    prompt_tokens: Tokens
    output_tokens: tuple[int, ...] = ()
    samples: tuple[int, ...] = (0,)
    sampling: SamplingParams
    cache_scope: str = ""
    tenant: str = ""
    adapter: str = ""
    slo: SloTargets = NO_SLO

    @property
    def tokens(self) -> tuple[int, ...]:
        """Everything whose KV must exist before the next token is drawn."""
        return tuple(self.prompt_tokens) + self.output_tokens

    @property
    def num_tokens(self) -> int:
        """How many those are."""
        return len(self.prompt_tokens) + len(self.output_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """A worker's report on itself; the fields are those of the protobuf message."""

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    steps: int = 0
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    draining: bool = False
    prefill_tokens_pending: int = 0
    step_s: float = 0.0
    step_sequences: int = 0
    step_context_tokens: int = 0
    pool_hit_tokens: int = 0
    pool_node: str = ""
    pool_incarnation: int = 0
    pool_fetches: int = 0
    pool_fetched_blocks: int = 0
    pool_fetch_s: float = 0.0
    blocks_leaked: int = 0
    drained_by: str = ""
    changing_role: bool = False
