"""Draws of a seeded request that vLLM throws away, because they are those of a chunk before its prompt's last one.

vLLM turns the request's generator back by its offset, which generators on CPUs do not have: 0.32 ends there with an
error, as soon as a prompt with a seed takes more than one step. Here the state is put back instead.
"""

from typing import Any

import numpy as np
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

_KEPT = "_baton_puts_draws_back"


def put_draws_back(runner: type[CPUModelRunner] = CPUModelRunner) -> None:
    """Has model runners on CPUs do so from now on; once or more often."""
    if getattr(runner, _KEPT, False):
        return
    setattr(runner, _KEPT, True)
    sample, book = runner._sample, runner._bookkeeping_sync

    def sample_and_put_back(self: CPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        discarded = [self.input_batch.generators[row] for row in _discarded(self)]
        states = [generator.get_state() for generator in discarded]
        output = sample(self, *args, **kwargs)
        for generator, state in zip(discarded, states, strict=True):
            generator.set_state(state)
        return output

    def book_without_them(self: CPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        hidden = {row: generators.pop(row) for row in _discarded(self)}
        try:
            return book(self, *args, **kwargs)
        finally:
            generators.update(hidden)

    runner._sample, runner._bookkeeping_sync = sample_and_put_back, book_without_them


def _discarded(runner: CPUModelRunner) -> list[int]:
    """Rows of the step whose draws are thrown away, and that have a generator."""
    rows = np.nonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])[0]
    return [int(row) for row in rows if int(row) in runner.input_batch.generators]
