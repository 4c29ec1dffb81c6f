import json
from dataclasses import replace

import pytest

from router.routing.explanation import DecisionLog
from router.telemetry.explain import explanation_to_proto
from router.tenants.directory import TenantDirectory
from router.tenants.tenant import ANONYMOUS
from tests.router.routing.test_explanation import MEASURED, REQUEST, decide
from tests.router.served import serve

ASKED = {"X-Baton-Explain": "1"}


class Decided(DecisionLog):
    """Decides the same about every request that it is asked about."""

    def explain(self, request_id):
        self.decided(request_id, *decide())
        return super().explain(request_id)


def admins() -> TenantDirectory:
    return TenantDirectory((), replace(ANONYMOUS, admin=True))


async def test_an_admin_is_told_in_a_header():
    async with serve(directory=admins(), decisions=Decided("predictive")) as served:
        reply = await served.complete(ASKED)
    told = json.loads(reply.headers["X-Baton-Explanation"])
    assert told["request_id"] == reply.json()["id"]
    assert told["decode_worker"] == "d0"
    assert told["predicted"]["prefill_s"] > 0
    assert len(reply.headers["X-Baton-Explanation"]) < 4096


async def test_an_admins_stream_ends_with_a_comment():
    async with serve(directory=admins(), decisions=Decided("predictive")) as served:
        reply = await served.complete(ASKED, stream=True)
    comments = [line for line in reply.text.split("\n\n") if line.startswith(": baton-explain ")]
    assert len(comments) == 1
    assert json.loads(comments[0].removeprefix(": baton-explain "))["kind"] == "pair"


async def test_several_prompts_are_explained_one_by_one():
    async with serve(directory=admins(), decisions=Decided("predictive")) as served:
        reply = await served.complete(ASKED, prompt=["a", "b"])
    told = json.loads(reply.headers["X-Baton-Explanation"])
    first = reply.json()["id"]
    assert [one["request_id"] for one in told] == [first, f"{first}-1"]


@pytest.mark.parametrize("stream", [False, True])
async def test_nobody_else_is_told(stream):
    async with serve(decisions=Decided("predictive")) as served:
        reply = await served.complete(ASKED, stream=stream)
    assert reply.status_code == 200
    assert "X-Baton-Explanation" not in reply.headers
    assert "baton-explain" not in reply.text


async def test_decisions_are_counted_in_the_metrics():
    log = DecisionLog("predictive")
    log.decided(REQUEST, *decide())
    async with serve(decisions=log) as served:
        assert served.metric("baton_route_decisions_total", kind="pair") == 1
        assert served.metric("baton_route_decisions_total", kind="on_decode") == 0


def test_an_unknown_request_is_said_to_be_unknown():
    assert not explanation_to_proto(DecisionLog("predictive").explain(REQUEST)).known


def test_operators_get_all_of_it():
    log = DecisionLog("predictive")
    log.decided(REQUEST, *decide())
    log.ended(REQUEST, MEASURED)
    reply = explanation_to_proto(log.explain(REQUEST))
    assert reply.known
    assert reply.measured.first_token_s == MEASURED.first_token_s
    assert reply.predicted.prefill_s > 0
    assert [option.cost for option in reply.considered] == sorted(
        option.cost for option in reply.considered
    )
