"""The table of legs: where a leg of each kind may go."""

from itertools import product

import pytest

from baton.errors import InvariantError
from baton.ids import LegKind
from baton_worker.legs import ENDS, TRANSITIONS, LegState, WorkerLegTable
from tests.baton_worker.test_lifecycle import asked


@pytest.mark.parametrize("kind", LegKind)
def test_a_step_that_the_table_does_not_have_is_refused_with_the_legs_story(kind: LegKind):
    for begin, end in product(LegState, LegState):
        if end in TRANSITIONS[kind].get(begin, ()):
            continue
        legs = WorkerLegTable()
        leg = asked(kind)
        legs.admit(leg, 0.0)
        legs.story.record(leg.key, 0.0, "it was asked for")
        leg.state = begin
        with pytest.raises(InvariantError) as refused:
            legs.move(leg, end)
        assert "it was asked for" in refused.value.story_text


@pytest.mark.parametrize("kind", LegKind)
def test_every_leg_can_end_in_each_way_and_goes_nowhere_from_there(kind: LegKind):
    table = TRANSITIONS[kind]
    assert set().union(*table.values()) >= ENDS
    assert not ENDS & table.keys()
