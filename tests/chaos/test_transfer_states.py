"""A fault at every state of a hand-off: the request still ends in time with the right tokens, and no page stays behind.

A state is reached by holding the message that ends it in the relay between the two workers, or the prefill engine
before its next step; never by waiting for the right moment.
"""

import asyncio
from pathlib import Path

import pytest

from baton.ids import Role
from tests.chaos.world import TIMEOUT_S, World, right, until, world
from tests.decode_worker.cluster import prompt

pytestmark = [pytest.mark.alone, pytest.mark.chaos, pytest.mark.timeout(120)]

ASKED = prompt(100, max_tokens=12)

STATES = {
    "asking": "reserve",  # P wants pages, D has not heard it
    "granted": "granted",  # D has given pages, P has not heard it
    "writing": "",  # P has written some of the pages
    "written": "commit",  # all pages are written, D does not know
    "committed": "committed",  # D decodes, P does not know
}

PROCESS = ("kill_p", "kill_d", "stop_p", "stop_d")
WIRE = {  # to what the proxy counts
    "cut": "cut",
    "cut_in_a_message": "cut",
    "black_hole": "dropped_bytes",
    "half_open": "dropped_bytes",  # D hears nothing more of P
    "deaf": "dropped_bytes",  # P hears nothing more of D
    "flip_there": "flipped",
    "flip_back": "flipped",
    "delay": "delayed",
    "throttle": "throttled",
}


async def reach(world: World, state: str) -> tuple[str, str]:
    """Waits until the request's hand-off is in `state`; returns the names of its two workers."""
    if STATES[state]:
        decode = await world.held()
        return world.busy(Role.PREFILL), decode
    await until(lambda: any(view.legs for view in world.router.view.workers))
    prefill, decode = world.busy(Role.PREFILL), world.busy(Role.DECODE)
    await world.workers[prefill].tell("allow 3")  # of the seven steps that the prompt takes
    await until(lambda: world.relays[decode].seen["granted"] > 0)
    return prefill, decode


async def strike(world: World, fault: str, prefill: str, decode: str) -> None:
    """Does the harm and proves it."""
    proxy = world.proxies[decode]
    match fault:
        case "kill_p":
            await world.workers[prefill].kill()
        case "kill_d":
            await world.workers[decode].kill()
        case "stop_p":
            await world.workers[prefill].stop()
        case "stop_d":
            await world.workers[decode].stop()
        case "cut":
            assert proxy.cut() == 1
        case "black_hole":
            proxy.black_hole()
        case "half_open":
            proxy.forward.dropping = True
        case "deaf":
            proxy.backward.dropping = True
        case "cut_in_a_message":
            proxy.forward.cut_after(20)
        case "flip_there":
            proxy.forward.flip_bit(20)  # in what names the transfer, in most messages
        case "flip_back":
            proxy.backward.flip_bit(30)
        case "delay":
            proxy.forward.delay_s = proxy.backward.delay_s = 0.3
        case "throttle":
            proxy.forward.bytes_per_s = proxy.backward.bytes_per_s = 2_000.0


def happened(world: World, fault: str, decode: str) -> bool:
    """Whether the proxy did what it was told: a fault of the wire shows only in the bytes that come after."""
    return world.proxies[decode].happened[WIRE[fault]] > 0


async def heal(world: World, prefill: str, decode: str) -> None:
    """What was stopped goes on, what was held is let go."""
    for relay in world.relays.values():
        relay.release()
    for name in ("p0", "p1", prefill, decode):
        worker = world.workers[name]
        await worker.resume()
        if worker.child.returncode is None and name.startswith("p"):
            await worker.tell("release")
    proxy = world.proxies[decode]
    proxy.black_hole(False)
    proxy.forward.delay_s = proxy.backward.delay_s = 0.0
    proxy.forward.bytes_per_s = proxy.backward.bytes_per_s = None


@pytest.mark.parametrize("engine", ["baton", "vllm"])
@pytest.mark.parametrize("fault", [*PROCESS, *WIRE])
@pytest.mark.parametrize("state", STATES)
async def test_a_fault_costs_neither_a_token_nor_a_page(
    tmp_path: Path, state: str, fault: str, engine: str
):
    async with world(tmp_path, engine) as here:
        if STATES[state]:
            here.hold(STATES[state])
        else:
            await here.workers["p0"].tell("hold")
            await here.workers["p1"].tell("hold")
        asking = asyncio.create_task(here.generate(ASKED))
        prefill, decode = await reach(here, state)
        await strike(here, fault, prefill, decode)
        if fault in WIRE:
            here.relays[decode].release()  # the fault is the wire's, not the relay's
        for name in {"p0", "p1"} - ({prefill} if fault in ("kill_p", "stop_p") else set()):
            await here.workers[name].tell("release")
        assert await asyncio.wait_for(asking, TIMEOUT_S) == right(ASKED)
        if fault in WIRE:
            await until(lambda: happened(here, fault, decode))  # heartbeats pass at the latest
        await heal(here, prefill, decode)
        await here.at_rest()
        again = prompt(90, max_tokens=5, first=300)
        assert await asyncio.wait_for(here.generate(again), TIMEOUT_S) == right(again)
        await here.at_rest()
