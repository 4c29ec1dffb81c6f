"""Text is cut before a stop string, wherever its pieces end, in time that its length bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.stop_strings import StopStrings, StopWatch

_STOPS = st.lists(st.text("ab.", min_size=1, max_size=4), max_size=4)
_PIECES = st.lists(st.text("ab.", max_size=4), max_size=12)


def _expected(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """Reads character by character: the first moment at which the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        if ending := [s for s in stops if text[:end].endswith(s)]:
            start = end - max(map(len, ending))
            return (text[:end] if include else text[:start]), True
    return text, False


@given(_STOPS, _PIECES, st.booleans())
def test_text_is_cut_at_the_first_stop_string_wherever_its_pieces_end(
    stops: list[str], pieces: list[str], include: bool
):
    machine = StopWatch(StopStrings(stops), include=include)
    shown = "".join([*map(machine.push, pieces), machine.finish()])
    assert (shown, machine.matched is not None) == _expected("".join(pieces), stops, include)


@given(_STOPS, _PIECES)
def test_what_is_shown_early_is_never_taken_back(stops: list[str], pieces: list[str]):
    machine = StopWatch(StopStrings(stops))
    text = "".join(pieces)
    final, _ = _expected(text, stops, include=False)
    shown = ""
    for piece in pieces:
        shown += machine.push(piece)
        assert final.startswith(shown)


@given(_STOPS.filter(bool), _PIECES)
def test_no_more_is_held_back_than_could_begin_a_stop_string(stops: list[str], pieces: list[str]):
    machine = StopWatch(StopStrings(stops))
    shown = "".join(map(machine.push, pieces))
    if machine.matched is None:
        held = "".join(pieces)[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize("include", [False, True])
def test_of_stop_strings_that_end_together_the_longest_wins(include: bool):
    machine = StopWatch(StopStrings(["c", "bc"]), include=include)
    assert machine.push("abc") == ("abc" if include else "a")
    assert machine.matched == "bc"


def test_the_work_is_linear_in_the_text_whatever_the_stop_strings_are(monkeypatch):
    """Sixteen stop strings of the largest length that the text nearly matches all the time."""
    looks = 0
    advance = StopStrings.advance

    def counted(self: StopStrings, state: int, character: str) -> int:
        nonlocal looks
        before, after = self.lengths[state], advance(self, state, character)
        looks += 1 + before + 1 - self.lengths[after]  # no more states than these were left
        return after

    stops = StopStrings(["a" * (511 - i) + "b" for i in range(16)])
    monkeypatch.setattr(StopStrings, "advance", counted)
    watches = [StopWatch(stops) for _ in range(4)]
    for _ in range(1000):
        for watch in watches:
            watch.push("aaa" + "c" * (_ % 2))
    assert looks <= 2 * sum(4 * (3 + i % 2) for i in range(1000))


def test_choices_share_the_states_and_not_where_they_are():
    stops = StopStrings(["ab"])
    one, other = StopWatch(stops), StopWatch(stops)
    assert (one.push("a"), other.push("b"), one.push("b")) == ("", "b", "")
    assert (one.matched, other.matched) == ("ab", None)
