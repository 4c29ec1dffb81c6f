"""What happens around each layer of a step: a layer waits for KV that is fetched,
and its KV is reported when it is complete.

Between the decoder, which computes layer after layer, the source that brings pages meanwhile, and the sink that takes
pages away.

    source   | bring 0 | bring 1 | bring 2 |
    decoder            | layer 0 | layer 1 | layer 2 |
    sink                         | take 0  | take 1  | take 2 |
"""

from collections.abc import Callable
from types import TracebackType

from baton.ids import SeqId
from baton.pages import FetchOutcome, ReadyEvent
from baton_engine.ports import KvSource, LayerReady, LayerSink
from baton_engine.scheduling.plan import StepPlan


class KvLayerHooks:
    """A context: fetches run inside it, and nothing writes to their pages once it is left.

    Args:
        plan: The step.
        source: Brings the plan's fetches; None where there are none.
        sink: Takes the plan's exports; None where nothing is handed off.
        mark: Marks where a GPU is through with a layer (`engine.device.layer_marker`); None on a CPU.

    Attributes:
        outcome: How the fetches went; known once the context is left, None without any.
    """

    def __init__(
        self,
        plan: StepPlan,
        source: KvSource | None,
        sink: LayerSink | None,
        mark: Callable[[], ReadyEvent] | None = None,
    ) -> None:
        self._plan = plan
        self._source = source if plan.fetches else None
        self._sink = sink if plan.exports else None
        self._mark = mark
        self._lost: list[frozenset[SeqId]] = []
        self.outcome: FetchOutcome | None = None

    @property
    def between_layers(self) -> "KvLayerHooks | None":
        """What the decoder has to call between layers: None where no pages are fetched or exported,
        which lets it compute all at once.
        """
        return self if self._source is not None or self._sink is not None else None

    def __enter__(self) -> "KvLayerHooks":
        if self._source is not None:
            self._source.start_load_kv(self._plan.fetches)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._source is not None:
            self.outcome = self._source.finish_load_kv()

    def before(self, layer_index: int) -> None:
        """The pages are about to be read in this layer. Blocks until those that are fetched are there."""
        if self._source is not None:
            self._lost.append(self._source.wait_for_layer_load(layer_index))

    def after(self, layer_index: int) -> None:
        """The pages hold this layer's keys and values, or will once the GPU has done what it was given. Nothing is told
        of sequences whose fetch has failed.
        """
        if self._sink is None:
            return
        lost = self._lost[layer_index] if self._lost else frozenset()
        exports = [export for export in self._plan.exports if export.seq_id not in lost]
        if exports:
            ready = self._mark() if self._mark is not None else None
            layer = LayerReady(layer_index=layer_index, exports=exports, ready=ready)
            self._sink.save_kv_layer(layer)
