"""vLLM's KV connector that leaves sending and receiving to a Baton worker: what vLLM asks and tells, as calls of
`VllmHandOffs` and, of the pool, `VllmPoolPages`.

vLLM makes two of these, one for its scheduler and one for its worker; both live on the engine's thread and share these
tables (`rank_connector` is the one whose worker halves are elsewhere). Written against vLLM 0.32: the interface is
experimental there.
"""

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.request import RequestStatus

from baton.ids import SeqId
from baton.page_order import first_block
from baton_vllm.adapters import Adapter, fingerprint
from baton_vllm.arena import VllmArena
from baton_vllm.hand_offs import VllmHandOffs
from baton_vllm.pool_pages import VllmPoolPages
from baton_vllm.seeded_draws import put_draws_back
from baton_vllm.weights import digest_weights
from baton_vllm.window_groups import windows_of

CONNECTOR_CONFIG = {
    "kv_connector": "BatonConnector",
    "kv_connector_module_path": "baton_vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
"""Of vLLM's `KVTransferConfig`; `kv_connector_extra_config` is `connector_objects`."""

_COMPLETE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


def connector_objects(
    hand_offs: VllmHandOffs,
    pool_pages: VllmPoolPages,
    arena: VllmArena,
    adapters: Sequence[Adapter],
    directory: Path,
) -> dict[str, Any]:
    """What both halves are given: vLLM makes them itself, in this process. `directory` is the model's."""
    return {
        "hand_offs": hand_offs,
        "pool_pages": pool_pages,
        "arena": arena,
        "adapters": adapters,
        "directory": directory,
    }


def page_facts(
    vllm_config: Any, kv_cache_config: Any, adapters: Sequence[Adapter], directory: Path
) -> dict[str, str]:
    """What decides the bytes of a page beside its shape: the model, its weights and adapters, vLLM, and where and how it
    computes. To be asked once the model is loaded (`digest_weights` of its `directory`).
    """
    model = vllm_config.model_config
    config = {k: v for k, v in model.hf_config.to_dict().items() if k != "_name_or_path"}
    parts = [
        json.dumps(config, sort_keys=True, default=str),
        f"{model.dtype} {model.quantization} {model.revision}",
        digest_weights(directory),
    ]
    layers = vllm_config.compilation_config.static_forward_context
    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    backends = {layers[name].get_attn_backend().get_name() for name in names}
    on_cpu = current_platform.is_cpu()
    facts = {
        "model": blake2b("\0".join(parts).encode(), digest_size=16).hexdigest(),
        "vllm": vllm.__version__,
        "attention": "+".join(sorted(backends)),
        "processor": torch.backends.cpu.get_cpu_capability()
        if on_cpu
        else current_platform.get_device_name().replace(" ", "-"),
        "pages": str(kv_cache_config.kv_cache_layout),
    }
    if adapters:
        facts["adapters"] = fingerprint(adapters, vllm_config.lora_config)
    return facts


class BatonConnectorMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Empty: both halves look at the same tables."""


class BatonConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module's text; the methods are vLLM's. A pool is there only where one group has all layers."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._hand_offs: VllmHandOffs
        self._pool_pages: VllmPoolPages
        self._arena: VllmArena
        self._adapters: Sequence[Adapter]
        self._directory: Path
        groups = kv_cache_config.kv_cache_groups
        self._groups = [tuple(group.layer_names) for group in groups]
        self._windows = windows_of(groups)
        self._block_tokens = groups[0].kv_cache_spec.block_size
        self._pool: Any = None
        if role is KVConnectorRole.WORKER:
            put_draws_back()  # here, for it is the one place that runs wherever a model does
        self._take(vllm_config.kv_transfer_config.kv_connector_extra_config, role)

    def _take(self, objects: dict[str, Any], role: KVConnectorRole) -> None:  # noqa: ARG002
        """What this half works on, of `connector_objects`: the same for both."""
        self._hand_offs = objects["hand_offs"]
        self._pool_pages = objects["pool_pages"]
        self._arena = objects["arena"]
        self._adapters = objects["adapters"]
        self._directory = objects["directory"]

    # Its worker's half.

    def get_mem_pool_context(self) -> VllmArena:
        """The KV cache is allocated in it."""
        return self._arena

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The KV cache is there."""
        self._arena.register(
            kv_caches,
            self._groups,
            block_tokens=self._block_tokens,
            windows=self._windows,
            facts=page_facts(
                self._vllm_config, self._kv_cache_config, self._adapters, self._directory
            ),
        )
        self._hand_offs.use_blocks_of(
            self._block_tokens,
            self._windows,
            step_tokens=self._vllm_config.scheduler_config.max_num_batched_tokens,
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """KV comes from peers and from the pool, not from here."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is computed before all of its KV is there."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,  # noqa: ARG002
        attn_metadata: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """A layer of the step is computed."""
        if (index := self._arena.computed(layer_name)) is not None:
            self._layer_computed(index)

    def _layer_computed(self, layer_index: int) -> None:
        self._hand_offs.layer_computed(layer_index)

    def wait_for_save(self) -> None:
        """Pages are kept for as long as they are read, so that no step waits for it."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:  # noqa: ARG002
        """The step is over."""
        sent, received = self._hand_offs.after_step()
        return sent, received | self._pool_pages.after_step()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of what was received that vLLM has to compute after all."""
        return self._pool_pages.take_lost_blocks()

    # Its scheduler's half.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The last page is never handed out: peers probe their way into the arena with it
        (`baton.layout.SPARE_BLOCKS`). All others are counted when they are.
        """
        gpu_block_pool.free_block_queue.remove(gpu_block_pool.blocks[-1])
        gpu_block_pool.num_gpu_blocks -= 1
        self._pool = gpu_block_pool
        hand_out = gpu_block_pool.get_new_blocks

        def counted(num_blocks: int) -> Any:
            blocks = hand_out(num_blocks)
            self._pool_pages.handed_out([block.block_id for block in blocks])
            return blocks

        gpu_block_pool.get_new_blocks = counted

    def on_new_request(self, request: Any) -> None:
        """A request is queued."""
        self._pool_pages.follow(request.request_id, request.all_token_ids)

    def get_num_new_matched_tokens(
        self,
        request: Any,
        num_computed_tokens: int,
    ) -> tuple[int | None, bool]:
        """How much of a prompt comes from elsewhere, while the request waits."""
        if self._hand_offs.holds_back(request.request_id):
            return None, False
        seq_id = SeqId(request.request_id)
        if not (self._pool_pages.has_pool or seq_id in self._hand_offs):
            return 0, False
        num_free = self._num_free(request, num_computed_tokens)
        tokens: int | None = 0
        if seq_id in self._hand_offs:
            unpromised = num_free - self._pool_pages.promised_blocks
            tokens = self._hand_offs.matched_tokens(seq_id, num_computed_tokens, unpromised)
        if tokens == 0:
            promised = self._hand_offs.promised_blocks + self._pool_pages.promised_blocks
            tokens = self._pool_pages.matched_tokens(
                request.request_id, num_computed_tokens, num_free - promised
            )
        return tokens, bool(tokens)

    def _num_free(self, request: Any, num_computed_tokens: int) -> int:
        """Blocks that nothing uses, and those in use that the request would share to its end."""
        num_free: int = self._pool.get_num_free_blocks()
        end = num_computed_tokens // self._block_tokens
        for group, window in enumerate(self._windows or (0,)):
            first = first_block(request.num_tokens, self._block_tokens, window)
            held = request.block_hashes[first:end]
            cached = [self._pool.get_cached_block(name, [group]) for name in held]
            num_free += sum(bool(blocks and blocks[0].ref_cnt) for blocks in cached)
        return num_free

    def update_state_after_alloc(
        self,
        request: Any,
        blocks: Any,
        num_external_tokens: int,  # noqa: ARG002
    ) -> None:
        """A request has blocks."""
        tables = blocks.get_block_ids()
        self._hand_offs.allocated(SeqId(request.request_id), tables)
        self._pool_pages.allocated(request.request_id, tables[0])

    def build_connector_meta(self, scheduler_output: Any) -> BatonConnectorMetadata:
        """The next step is decided."""
        num_tokens = scheduler_output.num_scheduled_tokens
        for req_id in scheduler_output.preempted_req_ids or ():
            self._pool_pages.preempted(req_id)
        for new in scheduler_output.scheduled_new_reqs:
            self._scheduled(
                new.req_id,
                new.block_ids,
                start=new.num_computed_tokens,
                num_tokens=num_tokens[new.req_id],
                anew=True,
            )
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, tables, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            self._scheduled(
                req_id,
                tables if tables is not None else [()] * len(self._groups),
                start=start,
                num_tokens=num_tokens[req_id],
                anew=req_id in cached.resumed_req_ids,
            )
        self._pool_pages.before_step()
        return BatonConnectorMetadata()

    def _scheduled(
        self,
        req_id: str,
        tables: Sequence[Sequence[int]],
        *,
        start: int,
        num_tokens: int,
        anew: bool,
    ) -> None:
        self._hand_offs.scheduled(
            SeqId(req_id),
            tables,
            start=start,
            num_tokens=num_tokens,
            anew=anew,
            pooled_tokens=self._pool_pages.pooled_tokens(req_id),
        )
        self._pool_pages.scheduled(req_id, tables[0], start=start, num_tokens=num_tokens, anew=anew)

    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, None]:
        """A request is over, and its blocks are about to be given back."""
        complete = request.status in _COMPLETE
        failed = request.status == RequestStatus.FINISHED_ERROR
        seq_id = SeqId(request.request_id)
        self._pool_pages.finished(request.request_id)
        return self._hand_offs.finished(seq_id, complete=complete, failed=failed), None
