from hypothesis import given
from hypothesis import strategies as st

from baton.discovery.registry import MOST_REGISTRATIONS
from router.discovery.roster import Roster

ADDRESSES = st.sampled_from(["a", "b", "c", "d", "listed"])
LOOKS = st.lists(
    st.tuples(st.sets(ADDRESSES), st.sets(ADDRESSES), st.floats(0.0, 6.0)), max_size=30
)


def test_what_is_sighted_is_asked_at_once():
    change = Roster().look({"b", "a"}, (), 0.0)
    assert (change.opened, change.closed) == (("a", "b"), ())


def test_who_answers_is_asked_although_nothing_names_it_any_more():
    roster = Roster(linger_s=10.0)
    roster.look({"a"}, (), 0.0)
    assert roster.look((), {"a"}, 1000.0).closed == ()
    assert not roster.is_sighted("a")


def test_an_address_that_nothing_names_and_nobody_answers_at_is_given_up_after_a_while():
    roster = Roster(linger_s=10.0)
    roster.look({"a"}, {"a"}, 0.0)
    assert roster.look((), (), 9.9).closed == ()
    assert roster.look((), (), 10.0).closed == ("a",)
    assert roster.look({"a"}, (), 11.0).opened == ("a",)


def test_an_address_that_was_given_up_is_asked_from_the_look_that_names_it_anew():
    roster = Roster(["listed"])
    roster.look({"a"}, {"a"}, 0.0)
    roster.give_up("a")
    roster.give_up("listed")
    assert roster.asked == {"listed"}
    assert roster.look({"a"}, (), 1.0).opened == ("a",)


def test_what_is_listed_is_asked_always_and_never_opened_twice():
    roster = Roster(["listed"], linger_s=1.0)
    assert roster.look({"listed"}, (), 0.0).opened == ()
    assert roster.look((), (), 100.0).closed == ()
    assert roster.asked == {"listed"}
    assert roster.is_sighted("listed")


def test_no_more_than_the_most_are_asked_and_a_free_place_is_taken():
    roster = Roster(linger_s=1.0, most=2)
    change = roster.look({"a", "b", "c"}, (), 0.0)
    assert (change.opened, change.left_out) == (("a", "b"), 1)
    change = roster.look({"b", "c"}, (), 1.0)
    assert (change.opened, change.closed, change.left_out) == (("c",), ("a",), 0)


@given(LOOKS, st.integers(1, 4))
def test_after_any_looks_the_right_addresses_are_asked(looks, most):
    roster = Roster(["listed"], linger_s=5.0, most=most)
    asked, wanted_s, now_s = {"listed"}, dict[str, float](), 0.0
    for sighted, answering, passed_s in looks:
        now_s += passed_s
        answering = answering & asked
        change = roster.look(sighted, answering, now_s)
        wanted_s |= dict.fromkeys((sighted | answering) & asked, now_s)
        assert set(change.opened).isdisjoint(asked - set(change.closed))
        assert set(change.opened) <= sighted
        assert set(change.closed).isdisjoint(sighted | answering | {"listed"})
        assert set(change.closed) == {
            one for one in asked - {"listed"} if now_s - wanted_s[one] >= 5.0
        }
        asked = (asked - set(change.closed)) | set(change.opened)
        wanted_s |= dict.fromkeys(change.opened, now_s)
        assert roster.asked == asked
        assert len(asked) <= most + 1
        assert change.left_out == len(sighted - asked)
        assert not change.left_out or len(asked) == most + 1


def test_listed_addresses_that_change_are_opened_and_closed_at_once():
    roster = Roster(["a", "b"])
    roster.look({"c"}, (), 0.0)
    change = roster.relist(["b", "c", "d"])
    assert (change.opened, change.closed) == (("d",), ("a",))
    assert roster.asked == {"b", "c", "d"}
    assert roster.look({"a"}, (), 1.0).opened == ("a",)


def test_all_that_may_register_are_asked():
    registered = [f"10.0.0.1:{number}" for number in range(MOST_REGISTRATIONS)]
    assert Roster().look(registered, (), 0.0).left_out == 0
