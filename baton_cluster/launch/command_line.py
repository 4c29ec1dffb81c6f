"""What lists of processes show as this process's command line, changed in place once a standby process has its role."""

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

_ARG_START, _ARG_END = 47, 48
"""Fields of /proc/self/stat, counted from 0: where the kernel finds the arguments in this process's memory."""

_PYTHON_M_MODULE = 3
"""Arguments that stay."""


def show_as(*arguments: str) -> None:
    """Shows `arguments` after `python -m module` from now on; cut off where the arguments that it was started with end.

    `sys.argv` stays as it is, and so does the environment, which libraries for this purpose write over.
    """
    stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    # The name of the program, in parentheses, may hold spaces.
    fields = ["", "", *stat.rpartition(")")[2].split()]
    begin, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    if begin == 0:
        return  # the kernel does not say
    room_at = begin + len(_joined(sys.orig_argv[:_PYTHON_M_MODULE]))
    shown = _joined(arguments)[: end - room_at - 1]
    ctypes.memset(room_at, 0, end - room_at)
    ctypes.memmove(room_at, shown, len(shown))


def _joined(arguments: Sequence[str]) -> bytes:
    return b"".join(os.fsencode(argument) + b"\0" for argument in arguments)
