import pytest

from baton.clock import ManualClock, MonotonicClock


def test_a_manual_clock_moves_only_when_moved() -> None:
    clock = ManualClock(5.0)
    assert clock.now_s() == clock.now_s() == 5.0
    clock.advance(1.5)
    assert clock.now_s() == 6.5


def test_a_manual_clock_cannot_go_back() -> None:
    with pytest.raises(ValueError, match="cannot go back"):
        ManualClock().advance(-1)


def test_the_real_clock_never_goes_back() -> None:
    clock = MonotonicClock()
    times = [clock.now_s() for _ in range(100)]
    assert times == sorted(times)
