"""Both workers' services against each other, with a router made of two gRPC streams."""

from pathlib import Path

import pytest

from baton.rpc.v1 import common_pb2
from tests.decode_worker.cluster import oracle, pair, prompt


@pytest.mark.parametrize("length", [1, 3, 4, 5, 40, 100])
async def test_a_disaggregated_request_draws_the_tokens_of_the_oracle(tmp_path: Path, length: int):
    async with pair(tmp_path) as both:
        asked = prompt(length)
        await both.ask(1, asked)
        assert await both.finished(1, 1) == oracle(both.p.runner, asked)
        await both.to_p.until(lambda: both.to_p.leg(1).handed_off is not None)
        done = both.to_p.leg(1).handed_off
        assert done is not None
        assert done.blocks_sent == -(-length // 4)
        assert both.to_d.leg(1).finished == {0: common_pb2.FINISH_REASON_LENGTH}
