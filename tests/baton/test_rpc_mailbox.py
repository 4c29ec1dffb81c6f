import asyncio
import threading

from baton.rpc.mailbox import Mailbox
from tests.waits import join


async def test_items_of_one_thread_arrive_in_order_and_none_is_lost():
    got: list[tuple[int, int]] = []
    everything = asyncio.Event()

    def receive(item: tuple[int, int]) -> None:
        got.append(item)
        if len(got) == 4000:
            everything.set()

    mailbox = Mailbox(asyncio.get_running_loop(), receive)

    def post(thread: int) -> None:
        for number in range(1000):
            mailbox.post((thread, number))

    threads = [threading.Thread(target=post, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    await asyncio.wait_for(everything.wait(), 30)
    for thread in threads:
        join(thread)
    for thread_number in range(4):
        assert [n for t, n in got if t == thread_number] == list(range(1000))


async def test_a_closed_mailbox_drops_what_comes():
    got: list[int] = []
    mailbox = Mailbox(asyncio.get_running_loop(), got.append)
    mailbox.post(1)
    mailbox.close()
    mailbox.post(2)
    await asyncio.sleep(0)
    assert got == [1]


async def test_posting_while_delivering_is_delivered_too():
    got: list[int] = []

    def receive(item: int) -> None:
        got.append(item)
        if item < 5:
            mailbox.post(item + 1)

    mailbox = Mailbox(asyncio.get_running_loop(), receive)
    mailbox.post(0)
    await asyncio.sleep(0)
    assert got == [0, 1, 2, 3, 4, 5]
