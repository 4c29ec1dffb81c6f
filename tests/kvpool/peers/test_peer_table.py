"""What is remembered of the ways to other nodes."""

from baton.ids import Incarnation, WorkerId, WorkerIdentity
from kvpool.peers.peer_table import ASSUMED_BYTES_PER_S, PeerLinks

NODE = WorkerIdentity(worker_id=WorkerId("pool-1"), incarnation=Incarnation(1))


def test_a_way_is_as_fast_as_its_latest_fetches() -> None:
    links = PeerLinks()
    links.landed(NODE, 1000, 0.5)
    links.landed(NODE, 1000, 1.0)
    assert links.rate(NODE) == 1000.0
    for _ in range(30):
        links.landed(NODE, 100, 1.0)
    assert 99.0 < links.rate(NODE) < 102.0


def test_what_it_takes_to_open_a_session_is_not_held_against_a_way() -> None:
    links = PeerLinks()
    links.landed(NODE, 1000, 2.0)
    assert links.rate(NODE) == ASSUMED_BYTES_PER_S
    links.landed(NODE, 1000, 1.0)
    links.failed(NODE, 0.0)
    links.landed(NODE, 1000, 2.0)
    assert links.rate(NODE) == 1000.0


def test_who_fails_again_and_again_is_left_alone_for_longer_and_longer() -> None:
    links, now_s, rests = PeerLinks(), 0.0, list[float]()
    for _ in range(8):
        links.failed(NODE, now_s)
        begin_s = now_s
        while not links.usable(NODE, now_s):
            now_s += 1.0
        rests.append(now_s - begin_s)
    assert rests == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    links.landed(NODE, 1, 1.0)
    links.failed(NODE, now_s)
    assert links.usable(NODE, now_s + 1.0)


def test_nodes_that_are_gone_are_forgotten() -> None:
    links = PeerLinks()
    for _ in range(2):
        links.landed(NODE, 1000, 1.0)
    links.keep(())
    assert links.rate(NODE) == ASSUMED_BYTES_PER_S


def test_a_node_that_may_still_write_is_left_alone_and_not_forgotten_until_it_has_stopped() -> None:
    links = PeerLinks()
    for _ in range(2):
        links.failed(NODE, 0.0)
        links.overdue(NODE)
    links.keep(())
    links.stopped(NODE)
    assert not links.usable(NODE, 1000.0)
    links.stopped(NODE)
    assert links.usable(NODE, 1000.0)
