"""Triton's kernels where the tests run: on a GPU, else under Triton's interpreter, which works on the CPU and computes
bfloat16 wrongly.
"""

import importlib
import importlib.util
import os
from types import ModuleType

import pytest
import torch

from baton_engine.kernels.ports import PagedBatch
from baton_engine.kernels.splits import SplitRule, Splits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WIDE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
"""What tests compute in that ask for no dtype: matrix instructions take no float32, and the interpreter no bfloat16."""
DTYPES = pytest.mark.parametrize("dtype", [WIDE, torch.float16], ids=["wide", "float16"])
TOLERANCE = {
    torch.float32: (2e-5, 1e-5),
    torch.float16: (4e-3, 4e-3),
    torch.bfloat16: (3e-2, 2e-2),
}
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason='no Triton: its kernels are untested (a torch for GPUs brings it; pip install "baton-serve[triton]" is enough)',
)


def kernels(name: str) -> ModuleType:
    """A module of `baton_engine.kernels.triton`, imported late: it needs Triton."""
    return importlib.import_module(f"baton_engine.kernels.triton.{name}")


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts equality up to the rounding of the dtype."""
    atol, rtol = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


def cut(batch: PagedBatch, rule: SplitRule, decodes: int) -> Splits:
    """The pieces of the first `decodes` rows."""
    row_of_piece, first_piece = rule.cut(batch.context_lens[:decodes].cpu().numpy())
    return Splits(
        row_of_piece=torch.from_numpy(row_of_piece).to(batch.slots.device),
        first_piece=torch.from_numpy(first_piece).to(batch.slots.device),
    )
