"""Run in a process of its own: vLLM's engine core with our connector hands prompts from itself to itself,
and computes them whole.

    python -m tests.baton_vllm.engine_run FAMILY FOLDER

It prints one line of JSON. The prefilling and the receiving half of a pair live in one engine under two cache salts, so
that neither finds the other's pages; what the sink is told is copied at that moment, as a sender would, and written to
the reserved pages later. So do those who fill a pool and those who fetch from it.
"""

import json
import os
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from baton.errors import CorruptKvError
from baton.generation import Prompt, SamplingParams
from baton.ids import BlockId, BlockKey, LegKind, SeqId
from baton.page_order import pages_in_order
from baton.pages import FetchOutcome, PageFetch, PublishedPage
from baton_engine.messages import PrefillStarted, Released, Reserved, SeqEvent
from baton_engine.ports import LayerReady
from baton_vllm.arena import VllmArena
from baton_vllm.hand_offs import VllmHandOffs
from baton_vllm.pool_pages import VllmPoolPages
from kv_transfer.memory.arena import WorkerMemory
from tests.baton_vllm.families import make_model

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
NEW_TOKENS = 12
CHUNK_TOKENS = 64
BLOCK_TOKENS = 32
PROMPT_LENGTHS = (33, 64, 95, 199, 300)
"""With windows of 64 tokens the third is one whose last token attends to a block that is behind it for the next one."""


def prompt_tokens(length: int) -> list[int]:
    return [(7 * place * place + 3 * place + length) % 250 + 3 for place in range(length)]


class BytesPool:
    """A `KvSource` and a `BlockSink` over the bytes of an engine's pages;
    blocks that are `corrupt` come with wrong ones.
    """

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._outcome = FetchOutcome()
        self.blocks: dict[BlockKey, list[bytes]] = {}
        self.corrupt: set[BlockKey] = set()

    @property
    def _layers(self) -> range:
        return range(len(self._engine.arena.layout.layers))

    def put(self, pages: Sequence[PublishedPage]) -> None:
        for page in pages:
            self.blocks[page.key] = [
                bytes(self._engine.page(layer, page.block)) for layer in self._layers
            ]

    def get_num_matched_blocks(self, seq_id: SeqId, keys: Sequence[BlockKey]) -> int:
        return sum(1 for _ in takewhile(self.blocks.__contains__, keys))

    def prefetch(self, seq_id: SeqId, keys: Sequence[BlockKey]) -> None:
        pass

    def start_load_kv(self, fetches: Sequence[PageFetch]) -> None:
        failed = {
            fetch.seq_id: CorruptKvError("wrong bytes")
            for fetch in fetches
            if self.corrupt & {*fetch.keys}
        }
        for fetch in fetches:
            for key, block in zip(fetch.keys, fetch.blocks, strict=True):
                for layer in self._layers:
                    page = self._engine.page(layer, block)
                    page[:] = bytes(len(page)) if key in self.corrupt else self.blocks[key][layer]
        brought = sum(len(fetch.keys) for fetch in fetches if fetch.seq_id not in failed)
        self._outcome = FetchOutcome(num_blocks=brought, seconds=1e-6, failed=failed)

    def wait_for_layer_load(self, layer_index: int) -> frozenset[SeqId]:
        return frozenset(self._outcome.failed)

    def finish_load_kv(self) -> FetchOutcome:
        return self._outcome

    def request_finished(self, seq_id: SeqId) -> None:
        pass


class NotedPages(VllmPoolPages):
    """Remembers how many tokens of each request came from the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: dict[str, int] = {}

    def scheduled(
        self, request_id: str, blocks: Sequence[int], *, start: int, num_tokens: int, anew: bool
    ) -> None:
        self.fetched[request_id] = self.pooled_tokens(request_id)
        super().scheduled(request_id, blocks, start=start, num_tokens=num_tokens, anew=anew)


class Engine:
    """vLLM's engine core, driven as a host drives it."""

    def __init__(self, folder: str) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        from baton_vllm.connector import CONNECTOR_CONFIG, connector_objects
        from baton_vllm.core import ToldScheduler
        from baton_vllm.window_groups import choosing

        self.memory = WorkerMemory()
        self.arena = VllmArena(self.memory)
        self.hand_offs, self.pool_pages = VllmHandOffs(sink=self), NotedPages()
        config = EngineArgs(
            **engine_args(folder),
            scheduler_cls=ToldScheduler,
            kv_transfer_config=CONNECTOR_CONFIG
            | {
                "kv_connector_extra_config": connector_objects(
                    self.hand_offs, self.pool_pages, self.arena, (), Path(folder)
                )
            },
        ).create_engine_config()
        self.core = EngineCore(config, choosing(Executor.get_class(config)), log_stats=False)
        self.events: list[SeqEvent] = []
        self.tokens: dict[str, list[int]] = {}
        self.copies: dict[tuple[str, int, int], bytes] = {}
        self.told_in_steps: dict[str, set[int]] = {}
        self.steps = 0
        self.free_at_first = self.num_free
        self.pool = BytesPool(self)
        if not self.arena.layout.windows:
            self.pool_pages.name_by(bytes(32), self.arena.layout)
            self.pool_pages.connect(self.pool, self.pool)

    @property
    def num_free(self) -> int:
        free: int = self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free

    def save_kv_layer(self, layer: LayerReady) -> None:
        for export in layer.exports:
            self.told_in_steps.setdefault(export.seq_id, set()).add(self.steps)
            for index, block in enumerate(export.blocks, export.first_block):
                self.copies[export.seq_id, layer.layer_index, index] = bytes(
                    self.page(layer.layer_index, block)
                )

    def page(self, layer: int, block: BlockId) -> memoryview:
        layout, num_pages = self.arena.layout, self.arena.num_pages
        first = layout.layer_offset(layer, num_pages) + block * layout.page_layer_bytes
        return self.memory.span.host_view[first : first + layout.page_layer_bytes]

    def ask(self, name: str, prompt: list[int], max_tokens: int, salt: str) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(prompt),
            mm_features=None,
            sampling_params=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=salt,
            data_parallel_rank=None,
        )
        self.core.add_request(*self.core.preprocess_add_request(request))

    def step(self) -> None:
        self.steps += 1
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        for output in outputs[0].outputs if outputs and 0 in outputs else ():
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        self.events += self.hand_offs.take_events()

    def run_until(self, names: Sequence[str], num_tokens: int) -> None:
        for _ in range(200):
            if all(len(self.tokens.get(name, ())) >= num_tokens for name in names):
                return
            self.step()
        raise AssertionError(f"{names} did not end: {self.tokens}")

    def whole(self, prompts: list[list[int]], salt: str, run: str = "") -> list[list[int]]:
        names = [f"{salt}{run}-{index}" for index in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self.ask(name, prompt, NEW_TOKENS, salt)
        self.run_until(names, NEW_TOKENS)
        return [self.tokens[name] for name in names]

    def pooled(self, prompts: list[list[int]], salt: str) -> dict[str, Any]:
        """All at once, under a salt of their own; how many tokens of each came from the pool."""
        names = [SeqId(f"{salt}-{index}") for index in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            asked = Prompt(prompt_tokens=tuple(prompt), sampling=SamplingParams())
            self.pool_pages.add(name, name, LegKind.GENERATE, asked)
        tokens = self.whole(prompts, salt)
        return {"tokens": tokens, "fetched": [self.pool_pages.fetched[name] for name in names]}

    def kept(self, name: str, num_tokens: int) -> list[BlockId]:
        """The blocks of a prompt that is to be sent, in the order in which they are."""
        tables = self.core.scheduler.kv_cache_manager.get_block_ids(name)
        order = pages_in_order(
            num_tokens,
            BLOCK_TOKENS,
            self.arena.layout.windows,
            start=0,
            end=-(-num_tokens // BLOCK_TOKENS),
        )
        return [BlockId(tables[group][block]) for block, group in order]

    def handed_off(
        self, prompts: list[list[int]], run: str, *, draws_first: bool = False
    ) -> dict[str, Any]:
        """All prompts at once: prefilled under one salt, received under another. Receivers that draw the first token
        compute the prompt's last one again.
        """
        from baton_vllm.core import VllmCore

        senders = [SeqId(f"p-{run}-{index}") for index in range(len(prompts))]
        receivers = [SeqId(f"d-{run}-{index}") for index in range(len(prompts))]
        salt = f"decode {draws_first}"
        for sender, receiver, prompt in zip(senders, receivers, prompts, strict=True):
            self.ask(receiver, prompt, NEW_TOKENS - (not draws_first), salt)
            room_tokens = len(prompt) + (not draws_first)
            self.hand_offs.receive(receiver, len(prompt), room_tokens=room_tokens)
            self.ask(sender, prompt, 1, "prefill")
            self.hand_offs.prefill(sender, len(prompt))
        self.run_until(senders, 1)
        held, equal, pages_of_groups = [], True, []
        for sender, receiver, prompt in zip(senders, receivers, prompts, strict=True):
            (reserved,) = [
                e for e in self.events if isinstance(e, Reserved) and e.seq_id == receiver
            ]
            held.append(reserved.held_blocks)
            kept = self.kept(sender, len(prompt))
            tables = self.core.scheduler.kv_cache_manager.get_block_ids(sender)
            pages_of_groups.append([sum(block > 0 for block in table) for table in tables])
            equal &= len(kept) == len(reserved.blocks) and min(kept) > 0 < min(reserved.blocks)
            for layer in range(len(self.arena.layout.layers)):
                for index, block in enumerate(reserved.blocks):
                    copy = self.copies[sender, layer, index]
                    equal &= copy == bytes(self.page(layer, BlockId(kept[index])))
                    if index >= reserved.held_blocks:
                        self.page(layer, block)[:] = copy
            if not draws_first:
                VllmCore(self.core, (), None, {}).go_on(receiver, self.tokens[sender][0])
            self.hand_offs.start(receiver, goes_on=True)
            self.hand_offs.end(sender)
        computed = self.computed_tokens(receivers, NEW_TOKENS - (not draws_first))
        released = {e.seq_id for e in self.events if isinstance(e, Released)}
        return {
            "tokens": [
                ([] if draws_first else self.tokens[p]) + self.tokens[d]
                for p, d in zip(senders, receivers, strict=True)
            ],
            "held_blocks": held,
            "pages_of_groups": pages_of_groups,
            "cached_tokens": [
                e.cached_tokens
                for sender in senders
                for e in self.events
                if isinstance(e, PrefillStarted) and e.seq_id == sender
            ],
            "told_in_steps": [len(self.told_in_steps[sender]) for sender in senders],
            "bytes_equal": equal,
            "tokens_computed_by_receivers": computed,
            "all_released": released >= set(senders),
        }

    def computed_tokens(self, receivers: Sequence[SeqId], num_tokens: int) -> int:
        """Runs them to their end; how many tokens vLLM computed for them."""
        computed = 0
        schedule = self.core.scheduler.schedule

        def counting(*args: Any) -> Any:
            nonlocal computed
            output = schedule(*args)
            computed += sum(output.num_scheduled_tokens.get(name, 0) for name in receivers)
            return output

        self.core.scheduler.schedule = counting
        self.run_until(receivers, num_tokens)
        self.core.scheduler.schedule = schedule
        return computed

    def aborted(self, prompt: list[int]) -> bool:
        """A receiver that is aborted while it waits keeps its blocks until then, and gives them back then."""
        before = self.num_free
        self.ask("gone", prompt, NEW_TOKENS, "gone")
        self.hand_offs.receive(SeqId("gone"), len(prompt), room_tokens=len(prompt) + 1)
        self.step()
        waited = self.num_free < before
        self.step()
        waited &= self.num_free < before
        self.hand_offs.end(SeqId("gone"))
        self.core.abort_requests(["gone"])
        waited &= self.num_free < before
        self.step()
        return waited and self.num_free == before and Released(seq_id=SeqId("gone")) in self.events


def engine_args(folder: str) -> dict[str, Any]:
    return {
        "model": folder,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": CHUNK_TOKENS,
        "block_size": BLOCK_TOKENS,
        "enable_prefix_caching": True,
        "enforce_eager": True,
    }


def tokens_of_vllm(folder: str, prompts: list[list[int]]) -> list[list[int]]:
    """By vLLM's own front."""
    from vllm import LLM, SamplingParams

    llm = LLM(**engine_args(folder))
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    llm.llm_engine.engine_core.shutdown()
    return tokens


def main(family: str, folder: str) -> None:
    make_model(family, Path(folder))
    prompts = [prompt_tokens(length) for length in PROMPT_LENGTHS]
    own = tokens_of_vllm(folder, prompts)
    engine = Engine(folder)
    result = {
        "vllm": own,
        "hybrid": engine.whole(prompts, "whole"),
        "first": engine.handed_off(prompts, "first"),
        "again": engine.handed_off(prompts, "again"),
        "draws first": engine.handed_off(prompts, "draws-first", draws_first=True),
        "aborted": engine.aborted(prompts[-1]),
        "windows": engine.arena.layout.windows,
    }
    if engine.pool_pages.has_pool:
        result["published"] = engine.pooled(prompts, "published")
        result["fetched"] = engine.pooled(prompts, "fetched")
        engine.pool.corrupt = {*engine.pool.blocks}
        result["corrupt"] = engine.pooled(prompts, "corrupt")
        result["corrupt again"] = engine.whole(prompts, "corrupt", "again")
    for _ in range(3):
        engine.step()
    result["leaked"] = engine.free_at_first - engine.num_free
    result["flushed"] = engine.core.scheduler.reset_prefix_cache()
    result["fingerprint"] = engine.arena.layout.model_fingerprint
    print(json.dumps(result))


if __name__ == "__main__":
    os.environ |= ENVIRONMENT
    main(*sys.argv[1:])
