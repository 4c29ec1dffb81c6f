"""Chooses the kernels for a device: the one place that knows which implementations exist."""

import logging
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import torch

from baton.errors import ConfigError
from baton_engine.kernels.cpu.kernel_set import SUPPORTED_DTYPES, CpuKernels
from baton_engine.kernels.cpu.library import load_library
from baton_engine.kernels.cpu.matmul import multiplies_int8
from baton_engine.kernels.ports import KernelSet
from baton_engine.kernels.reference import ReferenceKernels

logger = logging.getLogger(__name__)

_FIRST_WITH_FP8 = (8, 9)


def select_kernels(
    device: torch.device,
    dtype: torch.dtype,
    *,
    deterministic: bool = False,
    pairs: bool = False,
) -> KernelSet:
    """The fastest kernels that run here.

    Args:
        device: Where activations and pages are.
        dtype: Of both.
        deterministic: On a GPU, take those whose results do not depend on the batch (`check_deterministic`).
        pairs: On a CPU, multiply pairs of bfloat16 in attention, too (`Bfloat16Product.in_pairs`).
    """
    if device.type == "cpu" and dtype in SUPPORTED_DTYPES:
        library = load_library()
        if library is not None:
            return CpuKernels(library, dtype, pairs=pairs)
    if device.type == "cuda" and find_spec("triton") is None:
        logger.warning("Triton is not installed, torch serves instead: it is many times slower")
    elif device.type == "cuda":
        from baton_engine.kernels.triton import kernel_set

        if dtype in kernel_set.SUPPORTED_DTYPES:
            if deterministic:
                return kernel_set.InvariantTritonKernels()
            properties = torch.cuda.get_device_properties(device)
            return kernel_set.TritonKernels(properties.multi_processor_count)
    return ReferenceKernels()


def choose_kv_dtype(
    asked: str, dtype: torch.dtype, device: torch.device, *, widened: bool = False
) -> torch.dtype:
    """What KV pages hold.

    Args:
        asked: `auto` or `fp8_e4m3`.
        dtype: Of the activations.
        device: Where pages are.
        widened: The model is one of bfloat16, and `dtype` is float32 only because the processor multiplies nothing
            narrower (`choose_dtype`). Its pages then stay bfloat16, as they would be elsewhere: half the memory to read
            per token and to hand off.

    Raises:
        ConfigError: The GPU has no numbers of 8 bits.
    """
    if asked == "auto":
        return torch.bfloat16 if widened else dtype
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FIRST_WITH_FP8:
        raise ConfigError(
            f"kv_cache_dtype {asked} needs a GPU of compute capability 8.9 or later, "
            f"which {torch.cuda.get_device_name(device)} is not",
            param="engine.kv_cache_dtype",
        )
    return torch.float8_e4m3fn


def check_deterministic(device: torch.device, dtype: torch.dtype) -> None:
    """Says whether a request can be given the same bits in any batch here.

    Args:
        device: Where steps are computed.
        dtype: Of the activations.

    Raises:
        ConfigError: They cannot: on a GPU only Triton's kernels of 16 bits keep rows apart;
            the message says what is missing.
    """
    if device.type == "cpu":
        return
    missing = ""
    if find_spec("triton") is None:
        missing = "needs Triton, which is not installed"
    elif dtype not in (torch.float16, torch.bfloat16):
        missing = f"computes in float16 or bfloat16, not in {_name(dtype)}"
    if missing:
        raise ConfigError(f"deterministic on {device.type} {missing}", param="engine.deterministic")


def triton_build() -> str:
    """Which Triton kernels compute on a GPU here, besides its kind: 12 hex digits of their sources, Triton and torch."""
    import triton

    builds = sha256(f"{torch.__version__} {triton.__version__}".encode())
    for source in sorted((Path(__file__).parent / "triton").glob("*.py")):
        builds.update(source.read_bytes())
    return builds.hexdigest()[:12]


def check_quantization(quantization: str, device: torch.device, dtype: torch.dtype) -> None:
    """Says whether weights can be held so here; may block for some seconds while kernels are built.

    Args:
        quantization: `none` or `int8`.
        device: Where products are computed.
        dtype: Of the activations.

    Raises:
        ConfigError: They cannot; the message says what is missing.
    """
    if quantization == "none":
        return
    missing = ""
    if device.type != "cpu":
        missing = f"runs on CPUs, not on {device.type}"
    elif dtype not in SUPPORTED_DTYPES:
        missing = f"computes in float32 or bfloat16, not in {_name(dtype)}"
    elif not multiplies_int8():
        missing = "needs a processor with AVX-512 VNNI, and the CPU kernels, which are compiled when Baton is installed"
    if missing:
        raise ConfigError(f"quantization {quantization} {missing}", param="model.quantization")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
