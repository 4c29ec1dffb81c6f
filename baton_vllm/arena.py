"""vLLM's KV cache in memory that a worker can share: where it lies, and what its pages look like to a peer.

vLLM allocates its whole cache at once, `torch.zeros(size, dtype=int8)`, and asks its connector for a context to do so
in. Its views then lie as our arenas do: layers outermost, pages one after the other, in each page the heads. What a
head's bytes mean is known to the attention backend alone,
so that whatever decides it stands in the layout's fingerprint.

Groups of layers share the arena: at each of its layers lies one layer of every group, and a page is that of the group
whose block it is. A group with fewer layers than others leaves the last ones of its pages unused; these bytes are
handed off with the others.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from baton.errors import ConfigError, InvariantError
from baton.ids import LayerName
from baton.layout import DTYPE_BYTES, KvLayout
from baton_engine.ports import ArenaAllocator, ArenaBytes


class VllmArena(TorchFunctionMode):
    """Entered while vLLM allocates its KV cache, it gives that allocation, and only that, from `memory`.

    Args:
        memory: Where from. Host memory only: nothing here tells when a GPU has computed a layer.

    Attributes:
        misfit: Why its pages cannot be handed off, once it is known; None where they can.
    """

    def __init__(self, memory: ArenaAllocator) -> None:
        super().__init__()
        self.misfit: ConfigError | None = None
        self._memory = memory
        self._bytes: ArenaBytes | None = None
        self._layout: KvLayout | None = None
        self._pages = 0
        self._layer_index: dict[str, int] = {}
        self._layers_at: tuple[int, ...] = ()
        self._computed_at: Counter[int] = Counter()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See torch: is asked for every call of a torch function while entered."""
        named = dict(kwargs or {})
        if func is not torch.zeros or named.get("dtype") is not torch.int8:
            return func(*args, **named)
        if torch.device(named.get("device") or "cpu").type != "cpu":
            raise ConfigError(
                "engine.kind vllm: pages are handed off by workers on CPUs only; on a GPU a worker has to be hybrid"
            )
        if self._bytes is not None:
            raise InvariantError("vLLM allocated its KV cache twice")
        (size,) = args
        self._bytes = self._memory.allocate(size)
        assert self._bytes.view is not None
        return torch.frombuffer(self._bytes.view, dtype=torch.int8, count=size)

    def register(
        self,
        views: Mapping[str, torch.Tensor],
        groups: Sequence[Sequence[str]],
        *,
        block_tokens: int,
        windows: tuple[int, ...],
        facts: Mapping[str, str],
    ) -> None:
        """vLLM's views of its cache, `[num_blocks, num_kv_heads, block_tokens, 2 * head_dim]` for each layer.

        Where they do not lie as an arena's layers do, `misfit` names the layer and what differs.

        Args:
            views: By the layer's name.
            groups: The layers with KV of their own, group by group; others use the view of one of these.
            block_tokens: Tokens in a block, of the cache's specification.
            windows: Of the groups (`KvLayout.windows`).
            facts: What else decides the bytes of a page: the model, vLLM's version, the attention backend,
                the kind of processor.
        """
        layers = _by_address((name, views[name]) for names in groups for name in names)
        self._layer_index = {name: index for index, at in enumerate(layers) for name, _ in at}
        self._layers_at = tuple(len(at) for at in layers)
        try:
            self._layout = self._layout_of(layers, block_tokens, windows, facts)
            self._pages = layers[0][0][1].shape[0]
        except ConfigError as error:
            self.misfit = error

    def _layout_of(
        self,
        layers: Sequence[Sequence[tuple[str, torch.Tensor]]],
        block_tokens: int,
        windows: tuple[int, ...],
        facts: Mapping[str, str],
    ) -> KvLayout:
        if self._bytes is None:
            raise ConfigError("vLLM did not allocate its KV cache where its connector told it to")
        first, view = layers[0][0]
        shape, dtype = view.shape, str(view.dtype).removeprefix("torch.")
        if len(shape) != 4 or shape[2] != block_tokens or shape[3] % 2 or dtype not in DTYPE_BYTES:
            raise ConfigError(
                f"KV pages of shape {list(shape)} and {dtype} cannot be handed off between vLLM workers (blocks of {block_tokens} tokens)"
            )
        layout = KvLayout(
            model_fingerprint=fingerprint_of(facts),
            dtype=dtype,
            block_tokens=block_tokens,
            num_kv_heads=shape[1],
            head_dim=shape[3] // 2,
            layers=tuple(LayerName("+".join(name for name, _ in at)) for at in layers),
            windows=windows,
        )
        for index, (name, view) in ((i, layer) for i, at in enumerate(layers) for layer in at):
            offset = view.data_ptr() - self._bytes.address
            if (
                view.shape != shape
                or view.dtype != layers[0][0][1].dtype
                or offset != layout.layer_offset(index, shape[0])
                or view.stride(0) * view.element_size() != layout.page_layer_bytes
                or not view[0].is_contiguous()
            ):
                raise ConfigError(
                    f"KV pages of layer {name} do not follow each other as those of {first} do; they cannot be handed off"
                )
        return layout

    @property
    def layout(self) -> KvLayout:
        """Of the pages. By its fingerprint's names a refusal at the hello says what differs.

        Raises:
            InvariantError: vLLM has not allocated its cache yet, or has done so otherwise (`misfit`).
        """
        if self._layout is None:
            raise InvariantError("the KV cache that vLLM allocated is not laid out as an arena")
        return self._layout

    @property
    def num_pages(self) -> int:
        """With vLLM's null block, the first, and the spare one, the last."""
        return self._pages

    def computed(self, name: str) -> int | None:
        """One of vLLM's layers is computed, as each is once in a step.

        Returns:
            The index into `KvLayout.layers` of which all are computed with it: a layer of each group lies there, but for
            groups that have fewer, and they follow each other closely in a model. None where others are still to come,
            and for a layer that has no KV of its own.
        """
        index = self._layer_index.get(name)
        if index is None:
            return None
        self._computed_at[index] += 1
        if self._computed_at[index] < self._layers_at[index]:
            return None
        self._computed_at[index] = 0
        return index


def _by_address(
    layers: Iterable[tuple[str, torch.Tensor]],
) -> list[list[tuple[str, torch.Tensor]]]:
    """The layers at every address, in the order in which they lie."""
    at: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, view in layers:
        at.setdefault(view.data_ptr(), []).append((name, view))
    return [at[address] for address in sorted(at)]


def fingerprint_of(facts: Mapping[str, str]) -> str:
    """What else than its shape decides the bytes of a page, as a layout names it."""
    return " ".join(f"{name}={value}" for name, value in facts.items())
