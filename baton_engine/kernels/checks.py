"""What is refused before a kernel sees it: a tensor that it would misread, named as the caller knows it.

Kernels are given addresses. What a model computes with in every step is looked at once, when it is given its pages
(`baton_engine.models.prepare`), what changes from step to step once per step, where it is made (`ports.PagedBatch`,
`ports.Rotation`, `models.decoder.DecoderInput`). What layers hand to each other follows from both.
"""

import torch


def expect(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Refuses a tensor of another shape, dtype or device, or one that does not lie in one piece.

    Args:
        name: Of the tensor, for the message.
        tensor: What is given.
        shape: What is wanted; None for any length.
        dtype: The same.
        device: The same.

    Raises:
        ValueError: Names the tensor, what is wanted, and what was given.
    """
    given = tensor.shape
    fits = given == shape or (len(given) == len(shape) and _is_within(given, shape))
    if not fits or tensor.dtype != dtype or not tensor.is_contiguous():
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{name} must be contiguous {dtype} of shape [{wanted}], "
            f"not {tensor.dtype} of shape {list(given)}"
        )
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the other tensors are on {device}")


def _is_within(given: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return all(want is None or want == have for want, have in zip(wanted, given, strict=True))
