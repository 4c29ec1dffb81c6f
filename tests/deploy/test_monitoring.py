"""Names of metrics in rules, scalers and the gateway's route are names that processes have,
and every alert has its page.
"""

import functools
import re

from baton.errors import BatonError
from router.dispatch.faults import NO_WORKERS_FAULT
from tests.deploy.manifests import KUSTOMIZE, ROOT, Object, rendered

_METRIC = re.compile(r"\b(?:baton_|vllm:)[a-z_]+")
_DECLARED = re.compile(r'"((?:baton_|vllm:)[a-z_]+)"')
_OF_TYPES = re.compile(r"_(total|bucket|sum|count)$")
PACKAGES = (
    "router",
    "baton",
    "baton_worker",
    "baton_engine",
    "decode_worker",
    "prefill_worker",
    "kv_transfer",
    "kvpool",
)


@functools.cache
def declared() -> frozenset[str]:
    """Names of metrics in the product, as they are written: counters without `_total`."""
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return frozenset(name for file in files for name in _DECLARED.findall(file.read_text()))


def unknown(text: str) -> set[str]:
    return {
        name
        for name in _METRIC.findall(text)
        if name not in declared() and _OF_TYPES.sub("", name) not in declared()
    }


def rules() -> list[Object]:
    (made,) = rendered("prod-ib").of_kind("PrometheusRule")
    return [rule for group in made["spec"]["groups"] for rule in group["rules"]]


def test_rules_ask_for_metrics_that_are_told():
    assert len(rules()) >= 10
    for rule in rules():
        assert _METRIC.search(rule["expr"]), rule["alert"]
        assert not unknown(rule["expr"]), rule["alert"]


def test_scalers_and_the_gateways_picker_read_metrics_that_are_told():
    for one in rendered("prod-ib").of_kind("ScaledObject"):
        for trigger in one["spec"]["triggers"]:
            assert not unknown(trigger["metadata"]["query"])
    route = (KUSTOMIZE / "components" / "gateway-api" / "route.yaml").read_text()
    assert len(set(_METRIC.findall(route))) == 4
    assert not unknown(route)
    router = "".join(file.read_text() for file in (ROOT / "router" / "telemetry").glob("*.py"))
    assert all(f'"{name}"' in router for name in _METRIC.findall(route))


def test_workers_that_suffice_are_not_taken_away_for_it():
    """What waits is nothing while there are enough; and KEDA's own cooldown does not count above the least number."""
    for one in rendered("prod-ib").of_kind("ScaledObject"):
        spec = one["spec"]
        calm = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        assert calm["stabilizationWindowSeconds"] >= 600
        assert [policy["value"] for policy in calm["policies"]] == [1]
        assert "cooldownPeriod" not in spec
        queries = [trigger["metadata"]["query"] for trigger in spec["triggers"]]
        assert any("baton_queue_length" not in query for query in queries), one["metadata"]["name"]


def test_what_is_counted_once_is_not_waited_for_as_long_as_it_is_looked_for():
    """`increase` over a span forgets a single event when the span is over: a `for` as long never comes to its end."""
    minutes = re.compile(r"(\d+)m")
    for rule in rules():
        spans = [int(span) for span in re.findall(r"increase\(\w+\[(\d+)m\]", rule["expr"])]
        waits = int(minutes.fullmatch(rule["for"])[1])  # type: ignore[index]
        assert all(waits < span for span in spans), rule["alert"]


def test_a_worker_is_not_told_to_fail_for_what_is_no_fault_of_its_own():
    (rule,) = (one for one in rules() if one["alert"] == "BatonLegsFail")
    (left_out,) = re.findall(r'reason!~"([\w|]+)"', rule["expr"])
    assert left_out.split("|") == sorted(code for one in NO_WORKERS_FAULT for code in codes(one))


def codes(error: type[BatonError]) -> set[str]:
    """Of it and of what is derived from it."""
    return {error.code}.union(*map(codes, error.__subclasses__()))


def test_a_metric_that_nobody_tells_is_found():
    assert unknown("rate(baton_no_such_thing_total[5m])") == {"baton_no_such_thing_total"}


def test_every_alert_has_its_part_of_the_guide():
    guide = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
    for rule in rules():
        page, _, anchor = rule["annotations"]["runbook_url"].rpartition("#")
        assert page.endswith("docs/guides/kubernetes.md")
        assert anchor == rule["alert"].lower()
        assert f"### {rule['alert']}\n" in guide


def test_monitors_select_ports_that_are_named():
    made = rendered("prod-ib")
    (service,) = (s for s in made.of_kind("Service") if s["metadata"]["name"] == "router")
    (monitor,) = made.of_kind("ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= service["metadata"]["labels"].items()
    named = {port["name"] for port in service["spec"]["ports"]}
    assert {one["port"] for one in monitor["spec"]["endpoints"]} <= named
    (pods,) = made.of_kind("PodMonitor")
    ports = {p["name"] for one in made.processes() for p in one.spec["ports"]}
    assert {one["port"] for one in pods["spec"]["podMetricsEndpoints"]} <= ports
