import asyncio
import threading

import pytest

from baton_cluster.call_in_thread import call_in_thread


def test_the_thread_of_a_call_ends_with_it():
    def where(*, doubled: int) -> tuple[threading.Thread, int]:
        return threading.current_thread(), 2 * doubled

    thread, result = asyncio.run(call_in_thread(where, doubled=4))
    assert result == 8
    assert thread is not threading.current_thread()
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_what_the_call_raises_is_raised_to_whoever_waits():
    def fail() -> None:
        raise LookupError("no model")

    with pytest.raises(LookupError, match="no model"):
        asyncio.run(call_in_thread(fail))
