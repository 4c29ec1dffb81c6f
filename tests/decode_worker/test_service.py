"""Both workers' services against each other, with a router made of two gRPC streams."""

import asyncio
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from baton.config.schema import TransferConfig
from baton.errors import EngineError, UnreachableError
from baton.ids import LegId, RequestId, Role, WorkerIdentity, XferId, new_incarnation
from baton.rpc.channel import open_channel
from baton.rpc.generation import prompt_to_proto
from baton.rpc.hello import identity_to_proto
from baton.rpc.v1 import (
    common_pb2,
    control_pb2,
    control_pb2_grpc,
    transfer_pb2,
    worker_pb2,
)
from kv_transfer.memory.page_hash import Checksum
from kv_transfer.memory.pages import layer_pages
from tests.decode_worker.cluster import (
    LAYOUT,
    LIMITS,
    REGION_BLOCKS,
    Pair,
    Router,
    node,
    oracle,
    pair,
    prompt,
)
from tests.waits import WAIT_S

FULL = LIMITS.num_blocks * LIMITS.block_tokens


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


async def test_the_story_of_a_request_has_its_legs_hand_off_and_sequences_in_order(tmp_path: Path):
    async with pair(tmp_path) as both:
        asked = prompt(10)
        await both.ask(1, asked)
        await both.finished(1, 1)
        await both.settle()
        for worker, hand_off in ((both.p, "outbox"), (both.d, "ledger")):
            async with open_channel(worker.address) as channel:
                stub = control_pb2_grpc.ControlStub(channel)
                told = await stub.Story(control_pb2.StoryRequest(request_id="r"))
            assert {entry.core for entry in told.entries} == {"leg", hand_off, "engine", "cache"}
            times = [entry.at_s for entry in told.entries]
            assert times == sorted(times)
            assert times[-1] <= told.now_s
            told_by = {entry.core: entry.event for entry in reversed(told.entries)}
            assert told_by["leg"].startswith("asked to ")
            assert told_by[hand_off].startswith(("Opened", "Expected", "Reserve"))
            published, *_ = re.findall(r"published: .*, last block ([0-9a-f]{32})", str(told))
            async with open_channel(worker.address) as channel:
                stub = control_pb2_grpc.ControlStub(channel)
                of_block = await stub.Story(control_pb2.StoryRequest(request_id=published))
            assert [entry.event.split(":")[0] for entry in of_block.entries] == ["published"]


async def probed(both: Pair, target: WorkerIdentity, address: str) -> worker_pb2.LinkProbed:
    """What P says of its link to `target`, with no request anywhere."""
    probe = worker_pb2.ProbeLink(target=identity_to_proto(target), transfer_address=address)
    before = len(both.to_p.frames)

    def told() -> list[worker_pb2.LinkProbed]:
        return [probed for frame in both.to_p.frames[before:] for probed in frame.links_probed]

    await both.to_p.send(worker_pb2.Command(probe_link=probe))
    await both.to_p.until(lambda: bool(told()))
    (outcome,) = told()
    assert outcome.target == probe.target
    return outcome


async def test_a_link_is_tried_without_a_request_and_serves_the_next_one(tmp_path: Path):
    async with pair(tmp_path) as both:
        outcome = await probed(both, both.d.identity, both.d.address)
        assert not outcome.HasField("failure")
        assert not (await probed(both, both.d.identity, both.d.address)).HasField("failure")
        asked = prompt(10)
        await both.ask(1, asked)
        assert await both.finished(1, 1) == oracle(both.p.runner, asked)


async def test_a_link_that_carries_nothing_is_told_with_the_reason(tmp_path: Path):
    async with pair(tmp_path) as both:
        outcome = await probed(both, both.d.identity, f"unix:{tmp_path / 'nobody'}")
        assert outcome.failure.code == UnreachableError("").code
        another = replace(both.d.identity, incarnation=new_incarnation())
        assert (await probed(both, another, both.d.address)).HasField("failure")


async def test_a_worker_that_has_done_nothing_reports_all_pages_free(tmp_path: Path):
    async with pair(tmp_path) as both:
        for router in (both.to_p, both.to_d):
            await router.until(lambda router=router: router.load is not None)
            assert router.load is not None
            assert router.load.blocks_total == router.load.blocks_free == LIMITS.num_blocks


async def test_three_samples_of_one_prompt_are_decoded_from_one_hand_off(tmp_path: Path):
    async with pair(tmp_path) as both:
        asked = prompt(10, samples=3)
        await both.ask(1, asked)
        texts = await both.finished(1, 3)
        assert texts == oracle(both.p.runner, asked)
        assert len(set(map(tuple, texts))) == 3


async def test_many_requests_in_flight_do_not_disturb_each_other(tmp_path: Path):
    async with pair(tmp_path) as both:
        asked = {leg: prompt(5 + 7 * leg, first=leg, max_tokens=8) for leg in range(1, 13)}
        for leg, one in asked.items():
            await both.ask(leg, one)
        for leg, one in asked.items():
            assert await both.finished(leg, 1) == oracle(both.p.runner, one)


async def test_pages_that_the_decode_worker_holds_already_are_not_sent(tmp_path: Path):
    async with pair(tmp_path) as both:
        asked = prompt(42)
        for leg in (1, 2):
            await both.ask(leg, asked)
            assert await both.finished(leg, 1) == oracle(both.p.runner, asked)
            await both.to_p.until(lambda leg=leg: both.to_p.leg(leg).handed_off is not None)
        first, second = (both.to_p.leg(leg).handed_off for leg in (1, 2))
        assert first is not None
        assert second is not None
        assert first.blocks_sent == 11
        assert 0 < second.blocks_sent < 11


async def test_a_leg_that_ends_with_its_first_token_is_not_handed_off(tmp_path: Path):
    async with pair(tmp_path) as both:
        asked = prompt(20, max_tokens=1)
        await both.ask(1, asked)
        await both.to_p.until(lambda: bool(both.to_p.leg(1).finished))
        assert both.heard(1).texts(1) == oracle(both.p.runner, asked)
        await both.cancel(
            1, on_p=False
        )  # the router's part: it knows that nothing is left to decode
        await both.settle()
        assert both.to_p.leg(1).handed_off is None


async def test_first_tokens_do_not_wait_for_the_transfer(tmp_path: Path):
    async with pair(tmp_path) as both:
        asked = prompt(20)
        xfer_id = await both.ask(1, asked, expect=False)
        await both.to_p.until(lambda: bool(both.to_p.leg(1).first))
        assert both.to_p.leg(1).handed_off is None
        await both.ask(1, asked, submit=False, xfer_id=xfer_id)
        assert await both.finished(1, 1) == oracle(both.p.runner, asked)


async def expecting(both: Pair) -> None:
    await both.ask(1, prompt(40), submit=False)
    await both.d.server.check()


async def queued(both: Pair) -> None:
    both.p.runner.hold()
    await both.ask(9, prompt(30, first=100))
    await both.stepping(both.p)
    await both.ask(1, prompt(40))


async def prefilling(both: Pair) -> None:
    both.p.runner.hold()
    await both.ask(1, prompt(40))
    await both.stepping(both.p)
    both.p.runner.allow()
    await both.stepping(both.p)


async def waiting_for_the_router_at_d(both: Pair) -> None:
    await both.ask(1, prompt(40), expect=False)
    await both.to_p.until(lambda: bool(both.to_p.leg(1).first))


async def decoding(both: Pair) -> None:
    both.d.runner.hold()
    await both.ask(1, prompt(40, max_tokens=50))
    await both.stepping(both.d)


STATES = [expecting, queued, prefilling, waiting_for_the_router_at_d, decoding]


@pytest.mark.parametrize("reach", STATES)
@pytest.mark.parametrize("sides", ["both", "prefill", "decode"])
async def test_a_cancel_in_any_state_gives_every_page_back(tmp_path: Path, reach, sides: str):
    async with pair(tmp_path) as both:
        await reach(both)
        await both.cancel(1, on_p=sides != "decode", on_d=sides != "prefill")
        both.p.runner.release()
        both.d.runner.release()
        if reach is expecting and sides == "prefill":
            await both.cancel(1)  # P has never heard of it: only D can end it
        if reach is waiting_for_the_router_at_d and sides == "decode":
            await both.cancel(1)  # D has never heard of it: only P can end it
        await both.settle()
        if reach is queued:
            assert await both.finished(9, 1) == oracle(both.p.runner, prompt(30, first=100))


async def test_a_cancel_on_one_side_is_told_by_the_other(tmp_path: Path):
    async with pair(tmp_path) as both:
        await prefilling(both)
        await both.cancel(1, on_d=False)
        assert await both.failed(both.to_d, 1) == "cancelled"
        both.p.runner.release()
        both.p.runner.hold()
        await both.ask(2, prompt(40, first=300))
        await both.stepping(both.p)
        await both.cancel(2, on_p=False)
        assert await both.failed(both.to_p, 2) == "cancelled"


@pytest.mark.parametrize("reach", STATES)
async def test_the_end_of_a_routers_streams_cancels_its_legs(tmp_path: Path, reach):
    async with pair(tmp_path) as both:
        await reach(both)
        await both.close()
        await both.settle()


async def test_a_prefill_worker_that_closes_gives_its_transfers_up(tmp_path: Path):
    async with node(Role.DECODE, tmp_path) as d:
        async with node(Role.PREFILL, tmp_path) as p:
            both = Pair(p=p, d=d, to_p=Router(p), to_d=Router(d))
            await prefilling(both)
        assert await both.failed(both.to_d, 1) in ("cancelled", "worker_lost")
        await d.server.idle()
        assert d.pages_in_use() == 0
        await both.close()


async def test_the_loss_of_a_decode_worker_fails_the_legs_on_the_prefill_worker(tmp_path: Path):
    async with node(Role.PREFILL, tmp_path) as p:
        async with node(Role.DECODE, tmp_path) as d:
            both = Pair(p=p, d=d, to_p=Router(p), to_d=Router(d))
            await prefilling(both)
        assert await both.failed(both.to_p, 1) == "worker_lost"
        p.runner.release()
        await p.server.idle()
        assert p.pages_in_use() == 0
        await both.close()


async def test_a_leg_for_an_old_incarnation_fails_by_name(tmp_path: Path):
    async with pair(tmp_path) as both:
        old = replace(both.d.identity, incarnation=new_incarnation())
        await both.ask(1, prompt(8), expect=False, target=old)
        assert await both.failed(both.to_p, 1) == "stale_incarnation"


async def test_a_reservation_without_room_fails_in_time(tmp_path: Path):
    async with pair(tmp_path, transfer=TransferConfig(reserve_timeout_s=0.3)) as both:
        both.d.runner.hold()
        await both.generate(1, prompt(FULL - 8, max_tokens=4))
        await both.stepping(both.d)
        await both.ask(2, prompt(40))
        assert await both.failed(both.to_d, 2) == "no_room"
        assert await both.failed(both.to_p, 2) == "no_room"


async def test_an_expectation_that_nobody_fills_fails_in_time(tmp_path: Path):
    async with pair(tmp_path, transfer=TransferConfig(expect_timeout_s=0.2)) as both:
        await both.ask(1, prompt(8), submit=False)
        assert await both.failed(both.to_d, 1) == "deadline_exceeded"


async def test_a_prompt_that_can_never_fit_fails_on_both_sides(tmp_path: Path):
    async with pair(tmp_path) as both:
        await both.ask(1, prompt(LIMITS.max_model_len + 1))
        assert await both.failed(both.to_p, 1) == "context_length_exceeded"
        await both.cancel(1)


async def test_a_decode_worker_prefills_where_it_is_told_to(tmp_path: Path):
    async with pair(tmp_path) as both:
        asked = prompt(30, samples=2)
        await both.generate(1, asked)
        await both.to_d.until(lambda: len(both.to_d.leg(1).finished) == 2)
        leg = both.to_d.leg(1)
        assert leg.texts(2) == oracle(both.d.runner, asked)
        assert leg.prefilled is not None
        assert leg.prefilled.cached_tokens == 0


async def test_a_hybrid_worker_hands_over_to_itself_and_generates(tmp_path: Path):
    async with node(Role.HYBRID, tmp_path) as hybrid:
        both = Pair(p=hybrid, d=hybrid, to_p=Router(hybrid), to_d=Router(hybrid))
        handed, local = prompt(30), prompt(30, first=200)
        await both.ask(1, handed)
        await both.generate(2, local)
        assert await both.finished(1, 1) == oracle(hybrid.runner, handed)
        await both.to_d.until(lambda: bool(both.to_d.leg(2).finished))
        assert both.to_d.leg(2).texts(1) == oracle(hybrid.runner, local)
        await both.settle()
        await both.close()


async def test_a_draining_prefill_worker_waits_until_its_pages_are_committed(tmp_path: Path):
    async with pair(tmp_path) as both:
        asked = prompt(40)
        xfer_id = await both.ask(1, asked, expect=False)
        await both.to_p.until(lambda: bool(both.to_p.leg(1).first))
        drain = asyncio.create_task(both.p.server.drain(30.0))
        await both.to_p.until(lambda: both.to_p.load is not None and both.to_p.load.draining)
        await both.ask(2, prompt(8), expect=False)
        assert await both.failed(both.to_p, 2) == "draining"
        assert not drain.done()
        await both.ask(1, asked, submit=False, xfer_id=xfer_id)
        assert await both.finished(1, 1) == oracle(both.p.runner, asked)
        assert await drain


async def test_a_draining_decode_worker_finishes_what_it_has_and_refuses_the_rest(tmp_path: Path):
    async with pair(tmp_path) as both:
        await decoding(both)
        async with open_channel(both.d.address) as channel:
            control = control_pb2_grpc.ControlStub(channel)
            drain = asyncio.ensure_future(control.Drain(control_pb2.DrainRequest(timeout_s=30.0)))
            await both.to_d.until(lambda: both.to_d.load is not None and both.to_d.load.draining)
            await both.ask(2, prompt(8))
            assert await both.failed(both.to_d, 2) == "draining"
            assert await both.failed(both.to_p, 2) == "draining"
            both.d.runner.release()
            reply = await drain
        assert reply.drained
        assert reply.left == 0
        assert both.heard(1).texts(1) == oracle(both.p.runner, prompt(40, max_tokens=50))


async def test_a_worker_says_who_it_is_and_how_it_is(tmp_path: Path):
    async with pair(tmp_path) as both:
        await both.to_d.until(lambda: both.to_d.hello is not None)
        assert both.to_d.hello is not None
        assert both.to_d.hello.transfer_address == both.d.address
        async with open_channel(both.d.address) as channel:
            control = control_pb2_grpc.ControlStub(channel)
            reply = await control.Status(control_pb2.StatusRequest())
        assert [worker.state for worker in reply.workers] == ["ready"]
        assert b"vllm:num_requests_running 0.0" in both.d.server.collect()


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_worker_that_has_not_worked_yet_reports_all_its_pages_as_free(tmp_path: Path, side):
    async with pair(tmp_path) as both:
        router = both.to_p if side == "prefill" else both.to_d
        await router.until(lambda: router.load is not None)
        assert router.load is not None
        assert router.load.blocks_total == router.load.blocks_free == LIMITS.num_blocks


async def test_an_engine_whose_loop_died_ends_its_process_and_its_health(tmp_path: Path):
    async with node(Role.DECODE, tmp_path) as d:
        router = Router(d)
        d.runner.break_down()
        both = Pair(p=d, d=d, to_p=router, to_d=router)
        await both.generate(1, prompt(8))
        with pytest.raises(EngineError, match="died"):
            await asyncio.wait_for(d.server.failed, 30)
        assert d.server.state().word == "lost"
        await router.close()


async def test_a_command_without_content_ends_only_that_stream(tmp_path: Path):
    async with pair(tmp_path) as both:
        bad = Router(both.d)
        await bad.send(worker_pb2.Command())
        await bad.until(lambda: bad.ended)
        await bad.close()
        asked = prompt(8)
        await both.ask(1, asked)
        assert await both.finished(1, 1) == oracle(both.p.runner, asked)


def forged(both: Pair, **changes) -> common_pb2.Signed:
    """A permit for everything that is asked below, but for `changes`."""
    permit = both.permit(XferId("x"), prompt(8))
    claims = transfer_pb2.Permit.FromString(permit.content)
    for name, value in changes.items():
        setattr(claims, name, value)
    return common_pb2.Signed(content=claims.SerializeToString(), mac=permit.mac)


FORGERIES = [
    lambda both: forged(both, xfer_id="y"),
    lambda both: forged(both, num_blocks=3),
    lambda both: common_pb2.Signed(content=forged(both).content),
    lambda both: common_pb2.Signed(content=forged(both).content[:-1], mac=forged(both).mac),
    lambda both: common_pb2.Signed(),
]


@pytest.mark.parametrize("forge", FORGERIES)
async def test_a_forged_permit_is_refused_and_counted_and_the_workers_serve_on(tmp_path, forge):
    async with pair(tmp_path) as both:
        request = prompt_to_proto(LegId(1), RequestId("r"), prompt(8))
        permit = forge(both)
        expect = worker_pb2.Receive(request=request, permit=permit)
        await both.to_d.send(worker_pb2.Command(receive=expect))
        submit = worker_pb2.Prefill(request=request, permit=permit, transfer_address=both.d.address)
        await both.to_p.send(worker_pb2.Command(prefill=submit))
        assert await both.failed(both.to_d, 1) == "ticket_refused"
        assert await both.failed(both.to_p, 1) == "ticket_refused"
        counted = b'baton_kv_tickets_refused_total{reason="forged"} 1.0'
        assert counted in both.d.server.collect()
        assert counted in both.p.server.collect()
        await both.ask(2, prompt(8))
        assert await both.finished(2, 1) == oracle(both.p.runner, prompt(8))


async def test_a_permit_for_another_prompt_worker_or_tenant_is_refused(tmp_path: Path):
    async with pair(tmp_path) as both:
        stranger = replace(both.d.identity, incarnation=new_incarnation())
        for leg, permit in enumerate(
            (
                both.permit(XferId("a"), prompt(40)),
                both.permit(XferId("b"), prompt(8), target=stranger),
                both.permit(XferId("c"), replace(prompt(8), cache_scope="another")),
            ),
            start=1,
        ):
            request = prompt_to_proto(LegId(leg), RequestId("r"), prompt(8))
            expect = worker_pb2.Receive(request=request, permit=permit)
            await both.to_d.send(worker_pb2.Command(receive=expect))
            assert await both.failed(both.to_d, leg) == "ticket_refused"


@pytest.mark.parametrize("checksum", Checksum)
async def test_pages_that_were_corrupted_on_the_way_are_never_decoded(
    tmp_path: Path, checksum: Checksum, caplog: pytest.LogCaptureFixture
):
    async with pair(tmp_path, checksum=checksum) as both:
        await prefilling(both)
        row = await written_page(both)
        row[0] ^= 1
        both.p.runner.release()
        assert await both.failed(both.to_d, 1) == "kv_corrupt"
        assert await both.failed(both.to_p, 1) == "kv_corrupt"
        assert not both.to_d.leg(1).tokens
        await both.d.server.check()
        assert b"baton_kv_integrity_failures_total 1.0" in both.d.server.collect()
        assert "corrupt KV pages" in caplog.text
        await both.ask(2, prompt(40))
        assert await both.finished(2, 1) == oracle(both.p.runner, prompt(40))


async def test_pages_that_another_got_while_they_were_verified_are_not_told_as_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    verifying, go_on = threading.Event(), threading.Event()

    def late(*_: object) -> str:
        monkeypatch.undo()
        verifying.set()
        assert go_on.wait(WAIT_S)
        return "they hold what another wrote"

    monkeypatch.setattr("decode_worker.verifier.find_corruption", late)
    async with pair(tmp_path) as both:
        await both.ask(1, prompt(40))
        assert await asyncio.to_thread(verifying.wait, WAIT_S)
        await both.cancel(1, on_p=False)
        assert await both.failed(both.to_p, 1) == "cancelled"
        go_on.set()
        await both.ask(2, prompt(40))
        assert await both.finished(2, 1) == oracle(both.p.runner, prompt(40))
    assert "corrupt" not in caplog.text


async def written_page(both: Pair):
    """Some page of the decode worker into which the prefill worker has written."""
    pages = layer_pages(both.d.arena.region.memoryview, LAYOUT, REGION_BLOCKS)[0]
    async with asyncio.timeout(20):
        while True:
            for row in pages[: LIMITS.num_blocks]:
                if (row != 255).any():
                    return row
            await asyncio.sleep(0)


async def test_without_checksums_hand_offs_are_what_they_were(tmp_path: Path):
    async with pair(tmp_path, transfer=TransferConfig(checksums=False)) as both:
        await both.ask(1, prompt(40))
        assert await both.finished(1, 1) == oracle(both.p.runner, prompt(40))
