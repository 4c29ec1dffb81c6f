"""What becomes of each field of a request with this engine: a table, and the request that vLLM is given.

Samples are separate requests of vLLM's that share the prefix. A resumed prompt brings its output so far as a part of
vLLM's prompt: what vLLM then counts or looks back over is corrected here, or refused where it cannot be.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum
from hashlib import blake2b

from baton.errors import UnsupportedParameterError
from baton.generation import Prompt, SamplingParams
from baton.ids import SeqId

_SEED_MASK = (1 << 63) - 1


class Treatment(Enum):
    """What happens to a field."""

    PASSED = "passed"
    TRANSLATED = "translated"
    UNUSED = "unused"
    REFUSED = "refused"


SAMPLING: Mapping[str, Treatment] = {
    "temperature": Treatment.PASSED,
    "top_k": Treatment.PASSED,
    "top_p": Treatment.PASSED,
    "min_p": Treatment.PASSED,
    "presence_penalty": Treatment.PASSED,
    "frequency_penalty": Treatment.PASSED,
    "repetition_penalty": Treatment.PASSED,
    "logprobs": Treatment.PASSED,
    "ignore_eos": Treatment.TRANSLATED,  # not where a grammar says what is complete
    "seed": Treatment.TRANSLATED,  # one per sample, and a fresh one for a resumed stream
    "logit_bias": Treatment.TRANSLATED,
    "prompt_logprobs": Treatment.TRANSLATED,  # asked of the first sample only
    "stop_token_ids": Treatment.TRANSLATED,
    "max_tokens": Treatment.TRANSLATED,  # less what was generated before
    "min_tokens": Treatment.TRANSLATED,
    "allowed_token_ids": Treatment.TRANSLATED,
    "bad_words": Treatment.TRANSLATED,  # as token ids, past vLLM's tokenizer
    "grammar": Treatment.TRANSLATED,  # compiled by Baton's compiler, in place of vLLM's
    "beam_search": Treatment.REFUSED,  # vLLM searches above its engine, a request of one token per beam and step
}
"""Every field of `SamplingParams`. One that is refused, or not here,
is refused by its name where it differs from its default.
"""

PROMPT: Mapping[str, Treatment] = {
    "prompt_tokens": Treatment.TRANSLATED,
    "output_tokens": Treatment.TRANSLATED,
    "samples": Treatment.TRANSLATED,
    "sampling": Treatment.TRANSLATED,
    "cache_scope": Treatment.TRANSLATED,  # the salt of vLLM's prefix cache
    "slo": Treatment.TRANSLATED,  # its priority; the times are not scheduled for
    "adapter": Treatment.TRANSLATED,  # to vLLM's number of it
    "tenant": Treatment.TRANSLATED,  # takes turns at grammars, and is billed for what goes to the pool
}
"""Every field of `Prompt`; likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreRequest:
    """One request of vLLM's.

    Attributes:
        request_id: `SEQUENCE/SAMPLE`; of one that is handed off `SEQUENCE`.
        tokens: Its prompt.
        params: Arguments of vLLM's `SamplingParams`.
        bad_words: Token sequences that are not to be completed.
        grammar_of: The prompt whose grammar the output has to follow, its output so far included; None for none.
        salt: Keeps tenants' blocks apart; None for none.
        priority: Lower goes first.
        adapter: Name of the LoRA adapter; empty for none.
    """

    request_id: str
    tokens: list[int]
    params: Mapping[str, object]
    bad_words: tuple[tuple[int, ...], ...] = field(default=())
    grammar_of: Prompt | None = None
    salt: str | None = None
    priority: int = 0
    adapter: str = ""


def refusal(prompt: Prompt, stop_ids: frozenset[int]) -> UnsupportedParameterError | None:
    """Which field of `prompt` this engine cannot honour; None for none.

    Args:
        prompt: The prompt.
        stop_ids: The model's own end-of-sequence ids.
    """
    name = _unsupported(prompt, stop_ids)
    if name is None:
        return None
    return UnsupportedParameterError(f"{name} with the engine vllm", param=name.split()[0])


def _unsupported(prompt: Prompt, stop_ids: frozenset[int]) -> str | None:
    sampling = prompt.sampling
    if sampling.beam_search is not None:
        return "use_beam_search is not supported"
    for name in (*_refused(prompt, PROMPT), *_refused(sampling, SAMPLING)):
        return f"{name} is not supported"
    if sampling.allowed_token_ids and sampling.bad_words:
        return "bad_words is not supported beside allowed_token_ids"
    stops = stop_ids.union(sampling.stop_token_ids)
    allowed = sampling.allowed_token_ids
    if sampling.min_tokens and allowed and stops.issuperset(allowed):
        return "min_tokens is not supported where only stop tokens are allowed"
    if sampling.grammar:
        for name in ("allowed_token_ids", "bad_words", "min_tokens"):
            if getattr(sampling, name):
                return f"{name} is not supported beside a grammar"
    if not prompt.output_tokens:
        return None
    if sampling.presence_penalty:
        return "presence_penalty is not supported for a stream that is resumed"
    if sampling.frequency_penalty:
        return "frequency_penalty is not supported for a stream that is resumed"
    if any(len(word) > 1 for word in sampling.bad_words):
        return "bad_words of several tokens is not supported for a stream that is resumed"
    return None


def _refused(what: Prompt | SamplingParams, table: Mapping[str, Treatment]) -> Iterator[str]:
    """Fields that the table refuses or does not have, and that ask for something."""
    for each in fields(what):
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        how = table.get(each.name, Treatment.REFUSED)
        if how is Treatment.REFUSED and getattr(what, each.name) != default:
            yield each.name


def core_requests(seq_id: SeqId, prompt: Prompt) -> list[CoreRequest]:
    """One request of vLLM's per sample, in order."""
    return [
        CoreRequest(
            request_id=f"{seq_id}/{sample}",
            tokens=list(prompt.tokens),
            params=_params(prompt, sample, len(prompt.output_tokens)),
            bad_words=prompt.sampling.bad_words,
            grammar_of=prompt if prompt.sampling.grammar else None,
            salt=prompt.cache_scope or None,
            priority=-prompt.slo.priority,
            adapter=prompt.adapter,
        )
        for sample in prompt.samples
    ]


def receiver_draws_first(prompt: Prompt) -> bool:
    """Whether the first tokens are left to the worker that the prompt is handed to.

    To vLLM what the computing worker drew is a part of the prompt there, so that whatever counts or looks back over the
    output would miss it. The receiving worker then computes the prompt's last token again.
    """
    sampling = prompt.sampling
    return bool(
        len(prompt.samples) > 1
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.grammar
        or any(len(word) > 1 for word in sampling.bad_words)
    )


def prefill_request(seq_id: SeqId, prompt: Prompt) -> CoreRequest:
    """Computes `prompt` for another worker, and ends with one token;
    it means nothing where the receiving worker draws the first.
    """
    request = core_requests(seq_id, prompt)[0]
    if receiver_draws_first(prompt):
        asked = {name: request.params[name] for name in ("prompt_logprobs", "detokenize")}
        params: dict[str, object] = {"temperature": 0.0, "max_tokens": 1, **asked}
        return replace(request, request_id=seq_id, params=params, bad_words=(), grammar_of=None)
    params = dict(request.params) | {
        "max_tokens": 1,
        "min_tokens": int(prompt.sampling.min_tokens > len(prompt.output_tokens)),
    }
    return replace(request, request_id=seq_id, params=params)


def receive_requests(seq_id: SeqId, prompt: Prompt) -> list[CoreRequest]:
    """What goes on from `prompt` once its KV is here, one per sample: the first waits for it,
    the others are to be added then.
    """
    generated = len(prompt.output_tokens) + (not receiver_draws_first(prompt))
    first, *others = core_requests(seq_id, prompt)
    params = _params(prompt, prompt.samples[0], generated) | {"prompt_logprobs": None}
    return [replace(first, request_id=seq_id, params=params), *others]


def _params(prompt: Prompt, sample: int, generated: int) -> dict[str, object]:
    """Of the request that draws what comes behind `generated` tokens of output."""
    sampling = prompt.sampling
    passed = {
        name: getattr(sampling, name)
        for name, treatment in SAMPLING.items()
        if treatment is Treatment.PASSED
    }
    is_first = sample == prompt.samples[0]
    return passed | {
        "seed": _seed(sampling.seed, sample, generated),
        "logit_bias": dict(sampling.logit_bias) or None,
        "prompt_logprobs": sampling.prompt_logprobs if is_first else None,
        "ignore_eos": sampling.ignore_eos and not sampling.grammar,
        "stop_token_ids": list(sampling.stop_token_ids),
        "max_tokens": max(1, sampling.max_tokens - generated),
        "min_tokens": max(0, sampling.min_tokens - generated),
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "detokenize": False,
    }


def _seed(seed: int, sample: int, generated: int) -> int:
    """The client's own for the first sample of a new stream; else one that follows from it."""
    if not sample and not generated:
        return seed & _SEED_MASK
    digest = blake2b(f"{seed} {sample} {generated}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _SEED_MASK
