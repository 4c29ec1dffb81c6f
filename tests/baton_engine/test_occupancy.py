"""How many programs a multiprocessor holds, against what NVIDIA's occupancy calculator says of an H100."""

import pytest

from tests.baton_engine.triton_cases import kernels, needs_triton

pytestmark = needs_triton
H100 = {"shared_memory": 233_472, "most_threads": 2048}


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "num_warps", "programs"),
    [
        (95, 71_680, 4, 3),  # shared memory
        (168, 22_528, 4, 3),  # registers
        (184, 98_304, 8, 1),
        (32, 0, 8, 8),  # threads
        (255, 232_448, 4, 1),
        (255, 240_000, 16, 1),  # at least one, which the launch may refuse
    ],
)
def test_whatever_runs_out_first_decides(registers, shared_bytes, num_warps, programs):
    assert (
        kernels("occupancy").resident_programs(
            registers=registers, shared_bytes=shared_bytes, num_warps=num_warps, **H100
        )
        == programs
    )
