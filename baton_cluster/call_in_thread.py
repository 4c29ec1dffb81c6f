"""A thread for one call, which ends with it: where a worker's process loads its model,
before the engine's own thread starts.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


async def call_in_thread(call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Calls in a thread that ends once `call` returns; what it raises is raised here.

    A thread that has computed keeps the team that it computed with for as long as it lives, as those of
    `asyncio.to_thread` do. With two teams the OpenMP runtime counts more threads than cores and lets them sleep,
    instead of spin, whenever they wait for each other: some hundred times per step.
    """
    executor = ThreadPoolExecutor(1)
    try:
        return await asyncio.get_running_loop().run_in_executor(
            executor, partial(call, *args, **kwargs)
        )
    finally:
        executor.shutdown(wait=False)
