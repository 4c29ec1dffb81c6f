"""How many programs of a compiled kernel a GPU's multiprocessor holds at once."""

_REGISTERS_AT_ONCE = 256
"""Registers are given to warps in pieces of so many."""
_OWN_SHARED_BYTES = 1024
"""Of each program, beside what it asks for."""
_WARP = 32
_REGISTERS = 65_536
"""Of a multiprocessor, from compute capability 5.0 on."""


def resident_programs(
    *,
    registers: int,
    shared_bytes: int,
    num_warps: int,
    shared_memory: int,
    most_threads: int,
) -> int:
    """As NVIDIA's occupancy calculator counts them; at least 1.

    Args:
        registers: Per thread.
        shared_bytes: Per program.
        num_warps: Per program.
        shared_memory: Of a multiprocessor, in bytes.
        most_threads: Of a multiprocessor.
    """
    of_warp = -(-registers * _WARP // _REGISTERS_AT_ONCE) * _REGISTERS_AT_ONCE
    by_registers = _REGISTERS // (of_warp * num_warps)
    by_shared = shared_memory // (shared_bytes + _OWN_SHARED_BYTES)
    by_threads = most_threads // (_WARP * num_warps)
    return max(1, min(by_registers, by_shared, by_threads))
