"""POST /v1/completions: texts or token ids in, their continuations out."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from router.openai.answer import answer
from router.openai.body import parse_body, read_bounded
from router.openai.completion_shape import CompletionShape
from router.openai.echo import Echo, echo_of
from router.openai.guarding import checked_prompts
from router.openai.infill import infill
from router.openai.jobs import JobRun
from router.openai.length import check_text
from router.openai.order import Order, take_order
from router.openai.plan import Wanted, plan_runs
from router.openai.requests import CompletionRequest
from router.openai.sampling import completion_limit
from router.openai.serving import Serving
from router.openai.token_prompt import take_token_prompt
from router.openai.vocabulary import check_vocabulary


async def completions(request: Request, serving: Serving) -> Response:
    """Continues one or several prompts."""
    body = read_completion(await read_bounded(request, serving.max_body_bytes))
    limit = completion_limit(body)
    order = await take_order(request, serving, body, limit, "cmpl")
    prompts = await _token_prompts(body, order)
    chooses = body.num_samples > (body.n or 1)
    wanted = Wanted(
        limit=limit,
        samples=body.num_samples,
        logprobs=0 if body.logprobs is None and chooses else body.logprobs,
        prompt_logprobs=body.num_scored,
    )
    runs = plan_runs(order, body, prompts, wanted)
    echoes = await _echoes(body, runs, serving)
    shape = CompletionShape(order.head, body, runs, echoes, serving.tokenizer.pieces)
    return await answer(request, order, runs, shape, stream=body.stream)


def read_completion(raw: bytes) -> CompletionRequest:
    """The body of a request.

    Raises:
        InvalidRequestError: Not JSON, or not what the schema allows.
    """
    taken = take_token_prompt(raw)
    if taken is None:
        return parse_body(raw, CompletionRequest)
    rest, tokens = taken
    body = parse_body(rest, CompletionRequest)
    body.prompt = tokens  # type: ignore[assignment]  # a list of token ids in all but type
    return body


async def _token_prompts(body: CompletionRequest, order: Order) -> list[Sequence[int]]:
    tokenizer, special = order.serving.tokenizer, body.add_special_tokens
    for prompt in (*body.prompts, body.suffix):
        if isinstance(prompt, str):
            check_text(prompt, order.model, tokenizer, "prompt")
    if body.suffix and isinstance(body.prompt, str):
        both = [body.prompt, body.suffix]
        before, after = await checked_prompts(both, order.serving.guards, order.visit)
        return [await infill(before, after, tokenizer, special=special)]
    return [
        await tokenizer.encode(prompt, add_special_tokens=special)
        if isinstance(prompt, str)
        else prompt
        for prompt in await _guarded(body.prompts, order)
    ]


async def _guarded(
    prompts: Sequence[str | Sequence[int]], order: Order
) -> Sequence[str | Sequence[int]]:
    """The prompts as the guardrails let them pass; token ids stay what they are unless their text was replaced."""
    serving = order.serving
    if not serving.guards.active:
        return prompts
    for prompt in prompts:
        if not isinstance(prompt, str):
            check_vocabulary(prompt, order.model, "prompt")
    texts = [p if isinstance(p, str) else await serving.tokenizer.decode(p) for p in prompts]
    passed = await checked_prompts(texts, serving.guards, order.visit)
    return [
        prompt if text == new else new
        for prompt, text, new in zip(prompts, texts, passed, strict=True)
    ]


async def _echoes(body: CompletionRequest, runs: Sequence[JobRun], serving: Serving) -> list[Echo]:
    """What is repeated of each prompt, if anything is: as it was sent, or what was left of it."""
    if not body.echo:
        return []
    texts = [p if isinstance(p, str) else None for p in body.prompts]
    if body.truncate_prompt_tokens is not None or serving.guards.active:
        texts = [None] * len(texts)
    return [
        await echo_of(text, run.job.prompt.prompt_tokens, serving.tokenizer)
        for text, run in zip(texts, runs, strict=True)
    ]
