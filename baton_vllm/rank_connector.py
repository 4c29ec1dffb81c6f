"""The connector of a worker whose ranks are processes of their own (`baton_vllm.ranks`): its scheduler's half decides
as ever, in the worker's process; the halves in the ranks tell and are told.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole

from baton_vllm.arena import VllmArena, fingerprint_of
from baton_vllm.connector import BatonConnector, page_facts
from baton_vllm.pool_pages import VllmPoolPages
from baton_vllm.ranks import RankEnds, WorkerRanks

RANK_CONNECTOR_CONFIG = {
    "kv_connector": "RankConnector",
    "kv_connector_module_path": "baton_vllm.rank_connector",
    "kv_role": "kv_both",
}
"""Of vLLM's `KVTransferConfig`; `kv_connector_extra_config` is `rank_objects`."""


def rank_objects(ranks: WorkerRanks, directory: Path) -> dict[str, Any]:
    """What the halves are given: the ones in the ranks' processes what it is pickled to. `directory` is the model's."""
    return {"ranks": ranks, "directory": directory}


@dataclass(slots=True)
class RankMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the ranks are told with a step: see `WorkerRanks.begin_step`."""

    step: int
    sent: frozenset[str]
    received: frozenset[str]


class RankConnector(BatonConnector):
    """See the module's text; the methods are vLLM's. vLLM makes one half in each process."""

    def _take(self, objects: dict[str, Any], role: KVConnectorRole) -> None:
        # Without a pool: a worker with several ranks has no part in one.
        self._pool_pages = VllmPoolPages()
        self._adapters = ()
        self._directory = objects["directory"]
        ranks: WorkerRanks | RankEnds = objects["ranks"]
        if isinstance(ranks, WorkerRanks):
            self._ranks = ranks
            self._hand_offs = ranks.hand_offs
            self._hand_offs.use_blocks_of(
                self._block_tokens,
                self._windows,
                step_tokens=self._vllm_config.scheduler_config.max_num_batched_tokens,
            )
        elif role is KVConnectorRole.WORKER:
            self._link = ranks.take(self._vllm_config.parallel_config.rank)
            self._arena = VllmArena(self._link)

    # Its worker's half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The rank's KV cache is there."""
        _drop_names()
        facts = page_facts(self._vllm_config, self._kv_cache_config, (), self._directory)
        self._arena.register(
            kv_caches,
            self._groups,
            block_tokens=self._block_tokens,
            windows=self._windows,
            facts=facts,
        )
        if self._arena.misfit is not None:
            self._link.tell_misfit(self._arena.misfit.message, fingerprint_of(facts))
        else:
            self._link.tell_pages(self._arena.layout, self._arena.num_pages)

    def _layer_computed(self, layer_index: int) -> None:
        step = 0 if self._connector_metadata is None else self._connector_metadata.step
        if step:
            self._link.layer_computed(step, layer_index)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:  # noqa: ARG002
        """The step is over: every rank says what was decided for it, and vLLM waits for the last."""
        told = self._get_connector_metadata()
        return {*told.sent}, {*told.received}

    def get_block_ids_with_load_errors(self) -> set[int]:
        """None: without a pool nothing is loaded from here."""
        return set()

    # Its scheduler's half.

    def build_connector_meta(self, scheduler_output: Any) -> RankMetadata:
        """The next step is decided."""
        super().build_connector_meta(scheduler_output)
        step, sent, received = self._ranks.begin_step()
        return RankMetadata(step, sent, received)


def _drop_names() -> None:
    """Of the shared memory in which vLLM's ranks add their results up. All have mapped it when the first one gets its KV
    cache; vLLM itself would leave it behind, however a rank ends.
    """
    names = f"{os.environ['VLLM_DIST_IDENT']}-*"
    for file in Path("/dev/shm").glob(names):  # noqa: S108  # where shm_open has its names
        file.unlink(missing_ok=True)
