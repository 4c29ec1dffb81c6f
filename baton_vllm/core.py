"""vLLM's `EngineCore` in this process, as a `CorePort`.

Its loop is that of vLLM's own `InprocClient` (v1/engine/core_client.py).
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm.distributed.kv_events import KVEventBatch
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as VllmSampling
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as VllmFinish
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

from baton.errors import BatonError, EngineError, InvalidRequestError, UnsupportedParameterError
from baton.generation import FinishReason, TokenLogprobs
from baton_engine.ports import GrammarCompiler
from baton_vllm.block_events import BlockNames
from baton_vllm.grammar import HeldGrammar, hold, new_masks
from baton_vllm.metrics import StepCounts
from baton_vllm.ports import CoreLoad, CoreOutput, Scheduled
from baton_vllm.requests import CoreRequest
from baton_vllm.window_groups import keep_one_more

_FINISH = {
    VllmFinish.STOP: FinishReason.STOP,
    VllmFinish.REPETITION: FinishReason.STOP,
    VllmFinish.LENGTH: FinishReason.LENGTH,
    VllmFinish.ABORT: FinishReason.ABORT,
}
_PAUSE_S = 0.001


class ToldScheduler(Scheduler):
    """vLLM's scheduler, which says what it has put into a step before the model runs."""

    told: Callable[[Scheduled], None] | None = None

    def __init__(self, *, kv_cache_config: Any, **kwargs: Any) -> None:  # vLLM's own arguments
        keep_one_more(kv_cache_config.kv_cache_groups)
        super().__init__(kv_cache_config=kv_cache_config, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:  # vLLM's own signature
        """As vLLM's."""
        output = super().schedule(*args, **kwargs)
        if self.told is not None:
            new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
            before = [each.num_computed_tokens for each in new] + list(cached.num_computed_tokens)
            self.told(
                Scheduled(
                    started=tuple((each.req_id, each.num_computed_tokens) for each in new),
                    resumed=len(cached.resumed_req_ids),
                    num_sequences=len(output.num_scheduled_tokens),
                    num_tokens=output.total_num_scheduled_tokens,
                    context_tokens=sum(before),
                    is_idle=self._is_idle(output),
                )
            )
        return output

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """As vLLM's, which does not heed that the connector has a request wait
        where it reads no prefix cache.
        """
        if not super()._handle_blocked_waiting_request(request):
            return False
        if self.connector is None or not request.skip_reading_prefix_cache:
            return True
        tokens, _ = self.connector.get_num_new_matched_tokens(request, 0)
        return tokens is not None

    def _is_idle(self, output: Any) -> bool:
        """Where a request has been preempted the next step may begin another one;
        grammars become ready by themselves.
        """
        return not (
            output.total_num_scheduled_tokens
            or output.preempted_req_ids
            or any(
                request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
                for request in self.waiting
            )
        )


class VllmCore:
    """A `CorePort` over vLLM's own core.

    Args:
        core: vLLM's; its scheduler is a `ToldScheduler`.
        eos_ids: The model's end-of-sequence ids.
        grammars: Compiles grammars; None where they are refused. Closed with the core.
        adapters: vLLM's requests of adapters, by name.
        after_step: Called when vLLM has made a step.
    """

    def __init__(
        self,
        core: EngineCore,
        eos_ids: Sequence[int],
        grammars: GrammarCompiler | None,
        adapters: Mapping[str, LoRARequest],
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._core = core
        self._after_step = after_step
        self._adapters = adapters
        self._counts = StepCounts(core.vllm_config)
        self._grammars = grammars
        self._held: dict[str, StructuredOutputRequest] = {}
        self._num_logprobs: dict[str, int] = {}
        if grammars is not None:
            manager = core.structured_output_manager
            config = core.vllm_config
            manager._grammar_bitmask = new_masks(
                config.scheduler_config.max_num_seqs, config.model_config.get_vocab_size()
            )
        self._generation = {"eos_token_id": list(eos_ids)} if eos_ids else {}

    def tell_blocks(self, names: BlockNames) -> None:
        """Gives the events of the prefix cache to `names` from now on."""
        self._core.scheduler.kv_event_publisher = names

    def add(self, request: CoreRequest) -> None:
        """See CorePort."""
        config = self._core.vllm_config
        try:
            params = VllmSampling(**request.params, output_kind=RequestOutputKind.DELTA)
            params.update_from_generation_config(self._generation, None)
            params._bad_words_token_ids = [list(word) for word in request.bad_words] or None
            params.verify(config.model_config, None, config.structured_outputs_config, None)
            made, wave = self._core.preprocess_add_request(
                EngineCoreRequest(
                    request_id=request.request_id,
                    prompt_token_ids=request.tokens,
                    mm_features=None,
                    sampling_params=params,
                    pooling_params=None,
                    arrival_time=time.time(),
                    lora_request=self._adapters.get(request.adapter),
                    cache_salt=request.salt,
                    data_parallel_rank=None,
                    priority=request.priority,
                )
            )
        except (VLLMClientError, ValueError, TypeError) as error:
            raise InvalidRequestError(f"vLLM refuses the request: {error}") from error
        if request.grammar_of is not None:
            if self._grammars is None:
                raise UnsupportedParameterError("this worker's model cannot be held to a grammar")
            hold(made, request.grammar_of, self._grammars)
            self._held[request.request_id] = made.structured_output_request
        if params.logprobs is not None:
            self._num_logprobs[request.request_id] = params.logprobs
        self._counts.added(made)
        self._core.add_request(made, wave)

    def abort(self, request_ids: Sequence[str]) -> None:
        """See CorePort."""
        if request_ids:
            for request_id in request_ids:
                self._forget(request_id)
            self._counts.aborted(request_ids)
            self._core.abort_requests(list(request_ids))

    def go_on(self, request_id: str, token: int) -> None:
        """See CorePort. vLLM computes the token's KV next, and no part of the prompt again."""
        request = self._core.scheduler.requests[request_id]
        request.prompt_token_ids.append(token)
        request._all_token_ids.append(token)
        request.num_prompt_tokens += 1
        request.update_block_hashes()

    def bind(self, cores: Sequence[int]) -> None:
        """See CorePort. Each rank gets as many, or all where there are fewer cores than ranks."""
        ranks = getattr(self._core.model_executor, "workers", ())
        share = len(cores) // max(1, len(ranks))
        for number, rank in enumerate(ranks):
            own = cores[number * share : (number + 1) * share] if share else cores
            for task in Path(f"/proc/{rank.proc.pid}/task").iterdir():  # with those that compute
                with suppress(ProcessLookupError):  # some come and go
                    os.sched_setaffinity(int(task.name), own)

    def has_work(self) -> bool:
        """See CorePort."""
        return bool(self._core.scheduler.has_requests())

    def step(self, scheduled: Callable[[Scheduled], None]) -> Sequence[CoreOutput]:
        """See CorePort."""
        self._core.scheduler.told = scheduled
        outputs, is_executed = self._core.step_fn()
        self._core.post_step(model_executed=is_executed)
        self._after_step()
        if not is_executed and self.has_work():
            time.sleep(_PAUSE_S)  # as vLLM does; a grammar is compiled meanwhile
        told: list[CoreOutput] = []
        for client in (outputs or {}).values():
            self._counts.stepped(client)
            told += [self._output(output) for output in client.outputs]
        return told

    def flush(self) -> None:
        """See CorePort. vLLM by itself publishes events behind a step."""
        scheduler = self._core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        idle = {block.block_id for block in pool.blocks if not block.ref_cnt}
        pool.evict_blocks(idle)
        events = scheduler.kv_cache_manager.take_events()
        scheduler.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=events))

    def load(self) -> CoreLoad:
        """See CorePort."""
        scheduler = self._core.scheduler
        running, waiting = scheduler.get_request_counts()
        pool = scheduler.kv_cache_manager.block_pool
        return CoreLoad(
            running=running,
            waiting=waiting,
            blocks_total=pool.num_gpu_blocks - 1,  # one is vLLM's null block
            blocks_free=pool.get_num_free_blocks(),
        )

    def close(self) -> None:
        """See CorePort."""
        self._core.shutdown()
        if self._grammars is not None:
            self._grammars.close()

    def _output(self, output: EngineCoreOutput) -> CoreOutput:
        finish = output.finish_reason
        top = self._num_logprobs.get(output.request_id)
        held = None if finish is None else self._forget(output.request_id)
        return CoreOutput(
            request_id=output.request_id,
            tokens=output.new_token_ids,
            finish=_FINISH.get(finish),
            failed=_fault(held) if finish is VllmFinish.ERROR else None,
            logprobs=[] if output.new_logprobs is None else _logprobs(output.new_logprobs, top),
            prompt_logprobs=None
            if output.new_prompt_logprobs_tensors is None
            else tuple(_logprobs(output.new_prompt_logprobs_tensors)),
        )

    def _forget(self, request_id: str) -> StructuredOutputRequest | None:
        """It is over. Returns its grammar, if it had one."""
        self._num_logprobs.pop(request_id, None)
        return self._held.pop(request_id, None)


def _fault(held: StructuredOutputRequest | None) -> BatonError:
    """Why vLLM has ended a request with an error: a grammar that could not be compiled,
    or that the output could not be held to.
    """
    grammar = None if held is None else held.grammar
    fault = grammar.fault if isinstance(grammar, HeldGrammar) else grammar
    if isinstance(fault, BatonError):
        return fault
    return EngineError("vLLM could not go on with the request")


def _logprobs(told: Any, top: int | None = None) -> list[TokenLogprobs]:
    """Rows of vLLM's, whose first column is the token itself and whose others are the likeliest ones, in order: `top` of
    them, for it has as many for all requests of a step as one of them asked for.
    """
    end = None if top is None or top < 0 else 1 + top
    ids, logprobs = told[0][:, :end].tolist(), told[1][:, :end].tolist()
    ranks = told[2].tolist()
    return [
        TokenLogprobs(
            logprob=row[0], rank=rank, top_tokens=tuple(tokens[1:]), top_logprobs=tuple(row[1:])
        )
        for tokens, row, rank in zip(ids, logprobs, ranks, strict=True)
    ]
