"""What a request would cost on each worker, in seconds: the terms that `router.routing.predictive` adds up.

The terms one by one, and passes over many workers. `pricing.c` has the same in C; a change to one is a change to both, and a
test holds them against each other.
"""

from collections.abc import Iterable
from random import Random
from typing import NamedTuple

from router.routing.policy import Demand, Predicted
from router.routing.worker_view import WorkerView

Entry = tuple[int, int, float, float, WorkerView]
"""Whole milliseconds, legs, chance: so entries sort by cost, then lighter, then at random. Then the cost itself, and who."""

_NEVER_S = 1e6


class Work(NamedTuple):
    """How a worker comes by the KV of a prompt that it does not hold."""

    fetch_s: float
    compute_s: float
    computed_tokens: int

    @property
    def busy_s(self) -> float:
        """How long whoever decodes there is held up by it."""
        return self.fetch_s + self.compute_s


def prefill_costs(workers: Iterable[WorkerView], demand: Demand, rng: Random) -> list[Entry]:
    """Of computing the prompt on each, for another worker; best first.

    `prefill_s` of each worker, written out: called for every worker of every request, it takes a third of the time.
    """
    tokens, held, now_s, chance = demand.tokens, demand.held, demand.now_s, rng.random
    last = demand.tokens - 1
    entries: list[Entry] = []
    for worker in workers:
        forecast = worker.forecast
        cached = held.get(worker.slot, 0)
        if cached > last:
            cached = last
        if held.get(worker.pool_slot, 0) > cached:
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
    busy_s = work_of(worker, demand).busy_s
    return queue_s(worker, demand.now_s) + busy_s + busy_s * worker.sequences


def decode_s(worker: WorkerView, demand: Demand) -> float:
    """The request's own steps, and waiting for room."""
    return demand.output_tokens * tbt_s(worker, demand) + room_s(worker, demand)


def queue_s(worker: WorkerView, now_s: float) -> float:
    """Until the prompts that stand before a new one are computed, those of other routers included."""
    forecast = worker.forecast
    return forecast.queue_s(now_s) + forecast.token_s * worker.foreign_prefill_tokens


def work_of(worker: WorkerView, demand: Demand) -> Work:
    """Computing all, or fetching what the pool has beyond the worker's own and computing the rest: the quicker."""
    forecast, tokens = worker.forecast, demand.tokens
    held, pooled = demand.held_by(worker), demand.pooled_for(worker)
    compute_s = forecast.prefill_s(tokens - held, held)
    if pooled > held:
        fetch_s = forecast.fetching_s(pooled - held)
        rest_s = forecast.prefill_s(tokens - pooled, pooled)
        if fetch_s + rest_s < compute_s:
            return Work(fetch_s, rest_s, tokens - pooled)
    return Work(0.0, compute_s, tokens - held)


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
    return link.unhidden_s(size_bytes, work_of(prefill, demand).busy_s)


def predict(prefill: WorkerView, decode: WorkerView, demand: Demand) -> Predicted:
    """All parts of one choice."""
    work = work_of(prefill, demand)
    return Predicted(
        queue_s=queue_s(prefill, demand.now_s),
        fetch_s=work.fetch_s,
        prefill_s=work.compute_s,
        unhidden_s=unhidden_s(prefill, decode, demand),
        room_s=room_s(decode, demand),
        tbt_s=tbt_s(decode, demand),
        harm_s=work.busy_s * prefill.sequences,
    )
