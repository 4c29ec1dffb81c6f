"""vLLM's own metrics under its own names, beside those of the worker: fed as vLLM's front feeds them
(v1/engine/output_processor.py).
"""

import time
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import REGISTRY, Metric
from prometheus_client.registry import Collector
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, LoRARequestStates, RequestStateStats
from vllm.v1.request import Request


@dataclass(slots=True, eq=False)
class _Asked:
    """One request, as far as it is counted."""

    prompt_tokens: int
    max_tokens: int
    stats: RequestStateStats = field(default_factory=RequestStateStats)
    cached_tokens: int = 0
    is_prefilling: bool = True


class StepCounts:
    """Counts each step of vLLM's into vLLM's metrics, which are in the process's registry. Not thread-safe:
    the engine's thread.

    Args:
        vllm_config: vLLM's.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._metrics = PrometheusStatLogger(vllm_config)
        self._adapters = LoRARequestStates()
        self._asked: dict[str, _Asked] = {}

    def added(self, request: Request) -> None:
        """A request was added."""
        asked = _Asked(prompt_tokens=request.num_prompt_tokens, max_tokens=request.max_tokens)
        asked.stats.arrival_time = time.time()
        self._asked[request.request_id] = asked

    def aborted(self, request_ids: Iterable[str]) -> None:
        """They will not be heard of again."""
        for request_id in request_ids:
            self._asked.pop(request_id, None)

    def stepped(self, told: EngineCoreOutputs) -> None:
        """A step has told this."""
        step = IterationStats()
        for output in told.outputs:
            if (asked := self._asked.get(output.request_id)) is not None:
                self._count(step, asked, output, told.timestamp)
        self._metrics.record(told.scheduler_stats, step)

    def _count(
        self, step: IterationStats, asked: _Asked, output: EngineCoreOutput, now_s: float
    ) -> None:
        is_prefilling, asked.is_prefilling = asked.is_prefilling, False
        step.update_from_output(output, now_s, is_prefilling, asked.stats, self._adapters, None)
        if output.prefill_stats is not None:
            asked.cached_tokens = output.prefill_stats.num_cached_tokens
        if output.finish_reason is None:
            return
        del self._asked[output.request_id]
        step.update_from_finished_request(
            finish_reason=output.finish_reason,
            request_id=output.request_id,
            num_prompt_tokens=asked.prompt_tokens,
            max_tokens_param=asked.max_tokens,
            req_stats=asked.stats,
            num_cached_tokens=asked.cached_tokens,
        )
        ParentRequest.observe_finished_request(None, step, asked.stats.num_generation_tokens)


class OwnMetrics(Collector):
    """vLLM's metrics but for those whose names the worker has itself, with the same meaning.

    Args:
        taken: Names of the worker's.
    """

    def __init__(self, taken: Set[str]) -> None:
        self._taken = taken

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        for metric in REGISTRY.collect():
            if metric.name.startswith("vllm:") and metric.name not in self._taken:
                yield metric
