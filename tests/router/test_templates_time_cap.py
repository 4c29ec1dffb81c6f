"""What runs for too long in a thread is stopped there, and nothing else is."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from router.templates.time_cap import TimeCap, TimeCapError


def _for_ever() -> None:
    while True:
        pass


@pytest.fixture
def cap():
    made = TimeCap(0.1)
    yield made
    made.close()


def test_what_ends_in_time_is_left_alone(cap):
    assert [cap.run(lambda n=n: n) for n in range(100)] == list(range(100))


@pytest.mark.timeout(60)
def test_what_does_not_end_is_stopped_and_its_thread_goes_on(cap):
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            with pytest.raises(TimeCapError):
                pool.submit(cap.run, _for_ever).result()
            assert pool.submit(cap.run, threading.get_ident).result() > 0


@pytest.mark.timeout(60)
def test_only_the_thread_that_took_too_long_is_stopped():
    cap, stop = TimeCap(0.2), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(stop.wait)  # not under the cap
        with pytest.raises(TimeCapError):
            pool.submit(cap.run, _for_ever).result()
        assert not waiting.done()
        stop.set()
        assert waiting.result()
    cap.close()


def test_an_error_of_the_work_is_its_own(cap):
    with pytest.raises(ZeroDivisionError):
        cap.run(lambda: 1 // 0)
