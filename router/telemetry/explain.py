"""An explanation on its way out: to a client that may ask, in a header or a comment, and to operators over Control."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import msgspec

from baton.ids import RequestId
from baton.rpc.v1 import control_pb2 as pb
from router.routing.explanation import DecisionLog, Explanation

EXPLAIN_HEADER = "x-baton-explain"
"""A request of an admin's with `1` here has its routing explained."""

EXPLANATION_HEADER = "X-Baton-Explanation"
_CONSIDERED_IN_HEADERS = 4


def explanations_json(log: DecisionLog, request_ids: Sequence[RequestId]) -> bytes:
    """Compact JSON, fit for a header: an object, or a list for several prompts. Null for a request that is unknown."""
    found = [_brief(log.explain(request_id)) for request_id in request_ids]
    # A header is ASCII; the only words that need not be are workers' names.
    return json.dumps(
        msgspec.to_builtins(found[0] if len(found) == 1 else found), separators=(",", ":")
    ).encode()


def explanation_to_proto(explanation: Explanation | None) -> pb.ExplainReply:
    """The whole of it as its message."""
    if explanation is None:
        return pb.ExplainReply(known=False)
    predicted, measured = explanation.predicted, explanation.measured
    return pb.ExplainReply(
        known=True,
        policy=explanation.policy,
        kind=explanation.kind,
        prefill_worker=explanation.prefill_worker,
        decode_worker=explanation.decode_worker,
        tokens=explanation.tokens,
        held_by_prefill=explanation.held_by_prefill,
        held_by_decode=explanation.held_by_decode,
        output_tokens=explanation.output_tokens,
        decisions=explanation.decisions,
        why=explanation.why,
        considered=[
            pb.ConsideredPair(prefill_worker=c.prefill, decode_worker=c.decode, cost=c.cost)
            for c in explanation.considered
        ],
        predicted=None if predicted is None else pb.PredictedTimes(**asdict(predicted)),
        measured=None if measured is None else pb.MeasuredTimes(**asdict(measured)),
        pool_node=explanation.pool_node,
        held_by_pool=explanation.held_by_pool,
    )


def _brief(explanation: Explanation | None) -> Explanation | None:
    if explanation is None:
        return None
    considered = explanation.considered[:_CONSIDERED_IN_HEADERS]
    return replace(explanation, considered=considered)
