"""What a piece of Python costs, counted instead of timed: the same on a slow machine and on a busy one."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def steps_of(action: Callable[[], object]) -> int:
    """Instructions that the interpreter carries out for `action`; those of functions in C count as one."""
    steps = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.collect()
    gc.disable()  # what is done to garbage is not the action's
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
        gc.enable()
    return steps
