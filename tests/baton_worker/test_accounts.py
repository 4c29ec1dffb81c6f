"""Of a leg that is over nothing is kept, however it ended."""

import pytest
from prometheus_client import CollectorRegistry

from baton.clock import ManualClock
from baton.generation import FinishReason
from baton.ids import LegKind
from baton.telemetry.tracing import NotTraced
from baton_engine.messages import Generate, Prefill, PrefillStarted, SampledTokens
from baton_worker.accounts import LegAccounts
from baton_worker.messages import PrefilledMessage, TokensMessage
from baton_worker.metrics import WorkerMetrics
from baton_worker.spans import LegSpans
from tests.baton_worker.test_lifecycle import asked, new_core


@pytest.mark.parametrize("kind", [LegKind.PREFILL, LegKind.GENERATE])
def test_a_traced_leg_that_ends_with_its_first_token_is_forgotten(kind: LegKind):
    core, spans = new_core(), LegSpans(NotTraced(), "p", ManualClock())
    metrics = WorkerMetrics(CollectorRegistry(), block_tokens=4, num_blocks=10)
    accounts = LegAccounts(core, metrics, spans)
    leg = asked(kind)
    accounts.began(leg.key, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    command = core.handle(leg, 1.0)[-1]
    assert isinstance(command, Prefill | Generate)
    core.handle(PrefillStarted(seq_id=command.seq_id, num_blocks=2, cached_tokens=0), 2.0)
    assert len(spans) == 1
    last = SampledTokens(
        seq_ids=[command.seq_id], samples=[0], tokens=[7], finish_reasons=[FinishReason.STOP]
    )
    for action in core.handle(last, 3.0):
        if isinstance(action, PrefilledMessage | TokensMessage):
            accounts.told(action)
    assert not core.has_leg(leg.key)
    assert len(spans) == 0
