"""A device that is not here: tensors on torch's `meta` device, and a mode that watches what touches them.

What mixes tensors of host and device fails on a GPU, and on `meta` mostly does not. What brings a tensor to the host
makes a GPU wait; here it brings zeros, and is counted.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baton_engine.kernels.ports import HeadNorms, PagedBatch, Rotation
from baton_engine.kernels.reference import ReferenceKernels, rms_norm, rotate

ABSENT = torch.device("meta")
_FETCHING = {"aten::_to_copy", "aten::to"}
_CROSSING = {"aten::copy_", *_FETCHING}


class Watched(TorchDispatchMode):
    """Attributes:
    syncs: How often the host waited for the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.syncs: int = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        absent = [tensor for tensor in tensors if tensor.device == ABSENT]
        if name == "aten::_local_scalar_dense" and absent:
            raise AssertionError("one number is fetched from the device")
        if name in _FETCHING and absent and _wants_host(args, kwargs):
            self.syncs += 1
            dtype = kwargs.get("dtype") or absent[0].dtype
            return torch.zeros(absent[0].shape, dtype=dtype)
        if name in _CROSSING and _waits(args, kwargs, tensors):
            raise AssertionError(f"{name} has the host wait until a tensor is on the device")
        if absent and name not in _CROSSING:
            strangers = [t for t in tensors if t.device != ABSENT and t.dim() > 0]
            assert not strangers, f"{name} mixes host and device: {[t.shape for t in tensors]}"
        return func(*args, **kwargs)


class _Calls(TorchFunctionMode):
    """Notices what has torch bring Python's numbers to the device, with the host waiting,
    before any operation is seen.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        makes = func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == ABSENT
        reaches = func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
        if makes or (reaches and args[0].device == ABSENT and _names_places(args[1])):
            raise AssertionError("numbers are brought to the device while the host waits")
        return func(*args, **kwargs)


def _names_places(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, list) for part in parts)


def _waits(args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a copy from the host to the device is not left to the device (`non_blocking`)."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.device)]
    target = given[0] if given else tensors[0].device
    source = tensors[-1].device
    is_left = bool(kwargs.get("non_blocking")) or any(arg is True for arg in args[1:])
    return target == ABSENT and source != ABSENT and not is_left


def _wants_host(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    named = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.device)]
    return any(device.type == "cpu" for device in named)


class AbsentKernels(ReferenceKernels):
    """The twins, but for those that read lengths or count slots on the host: here every input is used where it lies."""

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        pages: torch.Tensor,
        slots: torch.Tensor,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """For slots that are all there."""
        _, kv_heads, _, block_tokens, head_dim = pages.shape
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        query, key, value = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
        if norms is not None:
            query = rms_norm(query, norms.query, norms.eps)
            key = rms_norm(key, norms.key, norms.eps)
        pages[slots // block_tokens, :, 0, slots % block_tokens] = rotate(key, rotation)
        pages[slots // block_tokens, :, 1, slots % block_tokens] = value
        return rotate(query, rotation)

    def paged_attention(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        window: int | None,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Of the right shape."""
        taken = pages[batch.block_tables.long()].sum() + batch.context_lens.sum()
        return query * (taken + batch.query_starts.sum()).to(query.dtype)


def watched(work: Callable[[], object]) -> int:
    """How often `work` made the host wait."""
    mode = Watched()
    with _Calls(), mode:
        work()
    return mode.syncs
