"""Steps that do not wait for the masks of grammars: who sits out, and what becomes of what was planned for them."""

from collections.abc import Sequence

from baton.ids import SeqId
from baton_engine.messages import Generate
from baton_engine.sampling.masks import late_masks
from baton_engine.scheduling.plan import Row
from tests.baton_engine.scheduling_world import World, limits, prompt

ASKED = Generate(seq_id=SeqId("a"), prompt=prompt(6, samples=2, max_tokens=6))


class Mask:
    """A constraint that allows everything, known to take long: its masks are sought as soon as a token is drawn."""

    fault = None

    def __init__(self) -> None:
        self.is_sought = False
        self.copies: list[Mask] = []

    def accept(self, token: int) -> None:
        self.is_sought = True

    def fork(self) -> "Mask":
        forked = Mask()
        forked.is_sought, forked.copies = self.is_sought, self.copies
        self.copies.append(forked)
        return forked

    def fork_for_draft(self, token: int) -> "Mask":
        raise AssertionError("nothing is guessed here")

    def begin(self, *, late: bool = False) -> None: ...

    def finding(self, within_s: float = 0.0) -> bool:
        return self.is_sought

    def fill(self, bits) -> None:
        raise AssertionError("nothing is scored here")

    def num_allowed(self, tokens: Sequence[int]) -> int:
        return 0

    def found(self) -> None:
        for mask in (self, *self.copies):
            mask.is_sought = False


def asked(mask: Mask) -> World:
    world = World(limits=limits())
    world.scheduler.handle(ASKED, 0.0, mask)
    world.step()
    return world


def finish(world: World, mask: Mask) -> None:
    for _ in range(ASKED.prompt.sampling.max_tokens):
        mask.found()
        world.step()


def assert_undisturbed(world: World) -> None:
    for sample in ASKED.prompt.samples:
        assert world.tokens("a", sample) == world.undisturbed(ASKED.prompt, sample)


def test_samples_that_all_sit_out_share_their_page_until_they_go_on():
    mask = Mask()
    world = asked(mask)
    assert world.step() == []
    finish(world, mask)
    assert_undisturbed(world)


def test_a_page_is_not_copied_for_samples_that_sit_out_beside_others():
    mask = Mask()
    world = asked(mask)
    world.tell(Generate(seq_id=SeqId("b"), prompt=prompt((7, 8, 9), max_tokens=3)))
    world.step()
    assert world.plans[-1].copies == ()
    finish(world, mask)
    assert_undisturbed(world)


def test_a_row_behind_one_that_drew_nothing_is_planned_anew_and_not_followed():
    mask = Mask()
    world = World(limits=limits())
    alone = prompt(6, max_tokens=6)
    world.scheduler.handle(Generate(seq_id=SeqId("a"), prompt=alone), 0.0, mask)
    world.step()
    mask.found()
    late, _ = world.scheduler.schedule(0.0)
    assert late is not None
    void = world.scheduler.plan_ahead()
    assert void is not None
    mask.is_sought = True
    result = world.runner.execute(late)
    mask.found()  # before anybody was to be told
    world.scheduler.update_from_output(late, result, 0.0)
    assert world.scheduler.plan_ahead() is None
    world.scheduler.withdraw(void)
    finish(world, mask)
    assert world.tokens("a") == world.undisturbed(alone)


class FoundWhenGivenUp(Mask):
    """Its mask is found after a step has given it up and before it is said that nobody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.is_sought = True

    def begin(self, *, late: bool = False) -> None:
        self.is_sought = False


def test_a_mask_that_is_found_as_it_is_given_up_is_drawn_by():
    seq = asked(Mask()).plans[-1].rows[0].seq
    seq.constraint = FoundWhenGivenUp()
    row = Row(seq=seq, start=0, num_tokens=1, samples=(0,))
    assert late_masks([row], lambda: True) == frozenset()


class Begun(Mask):
    """Its masks are sought without a word on who waits for them, as by a draft model that fails then."""

    def __init__(self) -> None:
        super().__init__()
        self.is_late = False

    def begin(self, *, late: bool = False) -> None:
        self.is_late |= late


def alone(mask: Mask) -> World:
    world = World(limits=limits())
    world.scheduler.handle(Generate(seq_id=SeqId("a"), prompt=prompt(6, max_tokens=6)), 0.0, mask)
    world.step()
    return world


def test_who_sits_out_is_told_whatever_its_mask_was_begun_for():
    mask = Begun()
    world = alone(mask)
    mask.is_late = False  # its prompt was not to wait either
    assert world.step() == []
    assert mask.is_late
    finish(world, mask)
    assert world.tokens("a") == world.undisturbed(prompt(6, max_tokens=6))


def test_a_mask_that_is_found_as_its_text_is_to_sit_out_is_drawn_by():
    world = alone(FoundWhenGivenUp())
    world.run()
    assert world.tokens("a") == world.undisturbed(prompt(6, max_tokens=6))
