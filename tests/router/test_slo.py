import pytest

from baton.config.schema import RouterConfig, SloClass
from baton.errors import ConfigError, InvalidRequestError
from baton.generation import NO_SLO, SloTargets
from router.slo import STANDARD, Slo, SloClasses

CLASSES = SloClasses(RouterConfig().slo_classes)


def test_the_default_class_promises_nothing_so_that_nobody_is_refused_for_it():
    slo = CLASSES.named("standard")
    assert (slo.ttft_s, slo.tbt_s) == (None, None)


def test_a_worker_is_promised_what_waiting_has_left():
    slo = Slo(name="quick", ttft_s=2.0, tbt_s=0.1, priority=2)
    assert slo.promise(0.5) == SloTargets(ttft_s=1.5, tbt_s=0.1, priority=2)
    assert slo.promise(7.0).ttft_s == 0.0
    assert STANDARD.promise(7.0) == NO_SLO


def test_classes_are_ordered_by_urgency():
    assert CLASSES.names == ("interactive", "standard", "batch")


def test_a_class_that_is_not_configured_is_no_class():
    with pytest.raises(ConfigError, match="interactive, standard, batch"):
        CLASSES.named("gold")


@pytest.mark.parametrize(
    ("own", "tier", "priority", "chosen"),
    [
        ("standard", None, 0, "standard"),
        ("standard", "auto", 0, "standard"),
        ("standard", "default", 0, "standard"),
        ("standard", "priority", 0, "standard"),
        ("standard", "flex", 0, "batch"),
        ("interactive", "standard_only", 0, "standard"),
        ("batch", "standard_only", 0, "batch"),
        ("interactive", "standard", 0, "standard"),
        ("interactive", None, 1, "standard"),
        ("interactive", None, 7, "batch"),
        ("standard", None, -3, "standard"),
        ("gold", None, 0, "standard"),
    ],
)
def test_a_request_gets_its_tenants_class_or_one_that_is_less_urgent(own, tier, priority, chosen):
    assert CLASSES.chosen(own, service_tier=tier, priority=priority).name == chosen


@pytest.mark.parametrize("tier", ["interactive", "platinum"])
def test_a_tier_above_the_tenants_or_of_no_class_is_refused_by_name(tier):
    with pytest.raises(InvalidRequestError) as refused:
        CLASSES.chosen("standard", service_tier=tier)
    assert refused.value.param == "service_tier"


def test_an_operators_own_classes_replace_the_defaults():
    classes = SloClasses({"gold": SloClass(ttft_s=0.5, priority=9), "standard": SloClass()})
    assert classes.names == ("gold", "standard")
    assert classes.chosen("gold").ttft_s == 0.5
