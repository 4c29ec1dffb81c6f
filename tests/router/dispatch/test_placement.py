from random import Random

import pytest

from baton.generation import Prompt, SamplingParams
from baton.ids import RequestId, Role
from router.dispatch.placement import Placement
from router.dispatch.request import RequestState
from router.ports import GenerationRequest
from router.routing.index import PrefixIndex
from router.routing.policies import policy_named
from router.routing.policy import Pair, RouteKind
from router.routing.view import ClusterView
from tests.router.known_workers import hello


class Place:
    """Placement by session among eight workers."""

    def __init__(self) -> None:
        index = PrefixIndex()
        view = ClusterView(index)
        for number in range(8):
            view.join(hello(f"h{number}", Role.HYBRID), f"unix:h{number}", 0.0)
        self.placement = Placement(
            view=view,
            index=index,
            policy=policy_named("session"),
            secret=b"s" * 32,
            rng=Random(0),
        )

    def chosen(self, tokens, *, session="", scope="") -> str:
        prompt = Prompt(prompt_tokens=tuple(tokens), sampling=SamplingParams(), cache_scope=scope)
        asked = GenerationRequest(
            request_id=RequestId("r"), prompt=prompt, timeout_s=9.0, session=session
        )
        job = RequestState(asked, 0.0)
        pair = self.placement.choose(job, prompt, frozenset(), 0.0)
        assert isinstance(pair, Pair)
        return pair.decode.identity.worker_id


@pytest.fixture
def place() -> Place:
    return Place()


def test_a_named_session_stays_whatever_its_prompts(place):
    chosen = {place.chosen(range(start, start + 100), session="t/ann") for start in range(20)}
    assert len(chosen) == 1


def test_prompts_that_begin_alike_are_one_session(place):
    chosen = {place.chosen([*range(64), *[number] * number]) for number in range(20)}
    assert len(chosen) == 1


def test_prompts_that_begin_otherwise_are_spread(place):
    assert len({place.chosen(range(start, start + 100)) for start in range(40)}) > 3


def test_equal_prompts_of_other_tenants_are_other_sessions(place):
    chosen = {place.chosen(range(100), scope=f"tenant-{number}") for number in range(40)}
    assert len(chosen) > 3


def test_every_choice_is_counted_and_remembered(place):
    place.chosen(range(10))
    log = place.placement.log
    assert log.counts[RouteKind.HYBRID] == 1
    assert log.explain(RequestId("r")) is not None
