from baton.ids import BlockId
from baton.pages import PublishedPage
from kvpool.client.publisher import PublishQueue
from tests.kvpool.client.arena_world import key


def page(number: int, tenant: str = "") -> PublishedPage:
    return PublishedPage(
        key=key(number), block=BlockId(number), generation=1, index=0, scope="", tenant=tenant
    )


def test_pages_are_taken_in_the_order_in_which_they_were_filled():
    queue = PublishQueue(8, wake=lambda: None)
    queue.put([page(1), page(2)])
    queue.put([page(3)])
    assert queue.take(2) == [page(1), page(2)]
    assert queue.take(2) == [page(3)]
    assert queue.take(2) == []


def test_the_oldest_are_dropped_and_counted_when_there_are_too_many():
    queue = PublishQueue(2, wake=lambda: None)
    queue.put([page(1), page(2)])
    queue.put([page(3), page(4), page(5)])
    assert queue.take(8) == [page(4), page(5)]
    assert queue.dropped == 3


def test_a_batch_has_one_owner():
    queue = PublishQueue(8, wake=lambda: None)
    queue.put([page(1, "a"), page(2, "b"), page(3, "b")])
    assert queue.take(8) == [page(1, "a")]
    assert queue.take(8) == [page(2, "b"), page(3, "b")]


def test_whoever_waits_is_woken_by_every_offer():
    woken: list[int] = []
    queue = PublishQueue(8, wake=lambda: woken.append(len(queue)))
    queue.put([page(1)])
    queue.put([page(2), page(3)])
    assert woken == [1, 3]
