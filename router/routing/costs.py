"""What a request would cost on each worker, in seconds: the terms that `router.routing.predictive` adds up.

The terms one by one, and passes over many workers. `pricing.c` has the same in C; a change to one is a change to both, and a
test holds them against each other.
"""

from collections.abc import Iterable
from random import Random

from router.routing.fetch import fetch_s
from router.routing.policy import Demand, Predicted
from router.routing.view import WorkerView

Entry = tuple[int, int, float, float, WorkerView]
"""Whole milliseconds, legs, chance: so entries sort by cost, then lighter, then at random. Then the cost itself, and who."""

_NEVER_S = 1e6


def prefill_costs(workers: Iterable[WorkerView], demand: Demand, rng: Random) -> list[Entry]:
    """Of computing the prompt on each, for another worker; best first.

    `prefill_s` of each worker, written out: called for every worker of every request, it takes a third of the time.
    """
    tokens, held, now_s, chance = demand.tokens, demand.held, demand.now_s, rng.random
    in_pool, last = demand.pool_tokens, demand.tokens - 1
    entries: list[Entry] = []
    for worker in workers:
        forecast = worker.forecast
        cached = held.get(worker.slot, 0)
        if cached > last:
            cached = last
        if in_pool > cached:
            cost_s = prefill_s(worker, demand)
        else:
            new = tokens - cached
            wait_s = forecast.ready_s - now_s
            if wait_s < forecast.behind_s:
                wait_s = forecast.behind_s
            computing_s = (
                forecast.prompt_s
                + forecast.token_s * new
                + forecast.attention_s * (new * (cached + 0.5 * new))
            )
            crowd = worker.decode_sequences + worker.foreign_sequences
            cost_s = (
                wait_s
                + forecast.token_s * worker.foreign_prefill_tokens
                + computing_s
                + computing_s * crowd
            )
        entries.append((int(1000.0 * cost_s), worker.legs, chance(), cost_s, worker))
    entries.sort()
    return entries


def decode_costs(workers: Iterable[WorkerView], demand: Demand, rng: Random) -> list[Entry]:
    """Of decoding on each; best first.

    `decode_s` of each worker, written out as `prefill_costs` is; a worker that is short of room goes the long way.
    """
    tokens, samples, output, chance = (
        demand.tokens, demand.samples, demand.output_tokens, rng.random
    )  # fmt: skip
    entries: list[Entry] = []
    for worker in workers:
        forecast = worker.forecast
        crowd = worker.decode_sequences + worker.foreign_sequences + samples
        context = worker.decode_tokens
        used = worker.used_tokens
        if used < context:
            used = context
        if used + tokens > worker.capacity_tokens or crowd > worker.max_sequences:
            cost_s = decode_s(worker, demand)
        else:
            if context < worker.reported_context_tokens:
                context = worker.reported_context_tokens
            cost_s = output * (
                forecast.step_s
                + forecast.sequence_s * crowd
                + forecast.context_s * (context + tokens)
            )
        entries.append((int(1000.0 * cost_s), worker.legs, chance(), cost_s, worker))
    entries.sort()
    return entries


def both_costs(workers: Iterable[WorkerView], demand: Demand, rng: Random) -> list[Entry]:
    """Of doing both on one; best first. Few are asked: hybrid workers, and decode workers for short prompts."""
    entries = []
    for worker in workers:
        cost_s = prefill_s(worker, demand) + decode_s(worker, demand)
        entries.append((int(1000.0 * cost_s), worker.legs, rng.random(), cost_s, worker))
    entries.sort()
    return entries


def prefill_s(worker: WorkerView, demand: Demand) -> float:
    """Until the prompt is computed there, and what those lose who decode there meanwhile."""
    fetching_s, computing_s = prompt_parts(worker, demand)
    harm_s = computing_s * worker.sequences
    return queue_s(worker, demand.now_s) + fetching_s + computing_s + harm_s


def decode_s(worker: WorkerView, demand: Demand) -> float:
    """The request's own steps, and waiting for room."""
    return demand.output_tokens * tbt_s(worker, demand) + room_s(worker, demand)


def queue_s(worker: WorkerView, now_s: float) -> float:
    """Until the prompts that stand before a new one are computed, those of other routers included."""
    forecast = worker.forecast
    return forecast.queue_s(now_s) + forecast.token_s * worker.foreign_prefill_tokens


def prompt_parts(worker: WorkerView, demand: Demand) -> tuple[float, float]:
    """Seconds of fetching from the pool and of computing, for what the worker does not hold: the cheaper way."""
    forecast = worker.forecast
    tokens = demand.tokens
    held = demand.held_by(worker)
    computed_s = forecast.prefill_s(tokens - held, held)
    depth = min(demand.pool_tokens, tokens - 1)
    if depth <= held:
        return 0.0, computed_s
    fetched_s = fetch_s(depth - held, worker.kv_token_bytes, forecast.pool)
    rest_s = forecast.prefill_s(tokens - depth, depth)
    return (fetched_s, rest_s) if fetched_s + rest_s < computed_s else (0.0, computed_s)


def tbt_s(worker: WorkerView, demand: Demand) -> float:
    """A decode step there once the request has joined."""
    sequences = worker.sequences + demand.samples
    context = max(worker.decode_tokens, worker.reported_context_tokens) + demand.tokens
    return worker.forecast.tbt_s(sequences, context)


def room_s(worker: WorkerView, demand: Demand) -> float:
    """Until the worker has pages and a place in its batch for the request, at the rate at which others end there."""
    used = max(worker.decode_tokens, worker.used_tokens)
    lacking = used + demand.uncached(worker) - worker.capacity_tokens
    crowd = worker.sequences + demand.samples - worker.max_sequences
    if lacking <= 0 and crowd <= 0:
        return 0.0
    running = worker.sequences
    if not running or not used:
        return _NEVER_S
    lasting_s = demand.output_tokens * tbt_s(worker, demand)
    return lasting_s * max(lacking / used, crowd / running)


def unhidden_s(prefill: WorkerView, decode: WorkerView, demand: Demand) -> float:
    """What of the hand-off computing does not hide."""
    if prefill is decode:
        return 0.0
    link = prefill.forecast.link_to(decode.slot)
    size_bytes = demand.uncached(decode) * decode.kv_token_bytes
    return link.unhidden_s(size_bytes, prompt_parts(prefill, demand)[1])


def predict(prefill: WorkerView, decode: WorkerView, demand: Demand) -> Predicted:
    """All parts of one choice."""
    fetching_s, computing_s = prompt_parts(prefill, demand)
    return Predicted(
        queue_s=queue_s(prefill, demand.now_s),
        fetch_s=fetching_s,
        prefill_s=computing_s,
        unhidden_s=unhidden_s(prefill, decode, demand),
        room_s=room_s(decode, demand),
        tbt_s=tbt_s(decode, demand),
        harm_s=computing_s * prefill.sequences,
    )
