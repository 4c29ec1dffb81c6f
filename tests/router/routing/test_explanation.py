from random import Random

from baton.ids import RequestId, Role
from router.routing.explanation import DecisionLog, Measured
from router.routing.index import PrefixIndex
from router.routing.policies import policy_named
from router.routing.policy import Demand, Pair, RouteKind
from router.routing.view import ClusterView
from tests.router.known_workers import hello

REQUEST = RequestId("cmpl-1")
MEASURED = Measured(
    queue_s=0.1,
    prefill_s=0.2,
    unhidden_s=0.0,
    first_token_s=0.3,
    cached_tokens=8,
    output_tokens=5,
)


def decide(policy: str = "predictive") -> tuple[Pair, Demand]:
    view = ClusterView(PrefixIndex())
    for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE)):
        view.join(hello(name, role), f"unix:{name}", 0.0)
    demand = Demand(tokens=50, samples=1, held={next(iter(view.workers)).slot: 8})
    pair = policy_named(policy).pair(list(view.workers), demand, Random(0))
    assert isinstance(pair, Pair)
    return pair, demand


def test_a_decision_is_explained_with_what_it_went_by():
    log = DecisionLog("predictive")
    pair, demand = decide()
    log.decided(REQUEST, pair, demand)
    told = log.explain(REQUEST)
    assert told is not None
    assert (told.policy, told.kind) == ("predictive", "pair")
    assert (told.prefill_worker, told.decode_worker) == ("p0", "d0")
    assert (told.tokens, told.held_by_prefill, told.held_by_decode) == (50, 8, 0)
    assert told.predicted == pair.predicted
    assert {option.prefill for option in told.considered} == {"p0", "p1", "d0"}
    assert told.measured is None


def test_once_it_has_ended_the_explanation_says_how_it_went():
    log = DecisionLog("predictive")
    log.decided(REQUEST, *decide())
    log.ended(REQUEST, MEASURED)
    told = log.explain(REQUEST)
    assert told is not None
    assert told.measured == MEASURED


def test_a_policy_that_predicts_nothing_says_so():
    log = DecisionLog("least_loaded")
    log.decided(REQUEST, *decide("least_loaded"))
    told = log.explain(REQUEST)
    assert told is not None
    assert told.predicted is None
    assert told.why


def test_only_the_last_requests_are_remembered():
    log = DecisionLog("predictive", kept=2)
    for number in range(3):
        log.decided(RequestId(str(number)), *decide())
    assert log.explain(RequestId("0")) is None
    assert log.explain(RequestId("2")) is not None


def test_a_request_that_was_placed_again_says_how_often():
    log = DecisionLog("predictive")
    log.decided(REQUEST, *decide())
    log.decided(REQUEST, *decide())
    told = log.explain(REQUEST)
    assert told is not None
    assert told.decisions == 2


def test_decisions_are_counted_by_kind():
    log = DecisionLog("predictive")
    log.decided(REQUEST, *decide())
    log.refused()
    assert log.counts[RouteKind.PAIR] == 1
    assert log.counts[RouteKind.UNAVAILABLE] == 1
    assert log.counts[RouteKind.HYBRID] == 0
