import threading

import pytest

from baton.clock import ManualClock
from baton.config.schema import TraceConfig
from baton.telemetry.otel import OtelTracer, open_tracer
from tests.waits import WAIT_S

pytestmark = pytest.mark.timeout(20)


class StuckProcessor:
    """One whose collector never answers: it ends only when it is told to give up."""

    def __init__(self) -> None:
        self.given_up = threading.Event()

    def on_start(self, span, parent_context=None):
        pass

    def on_end(self, span):
        pass

    def _on_ending(self, span):
        pass

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        assert self.given_up.wait(WAIT_S)
        return False

    def shutdown(self) -> None:
        assert self.given_up.wait(WAIT_S)


def test_closing_gives_a_collector_up_that_does_not_answer():
    stuck = StuckProcessor()
    tracer = OtelTracer(stuck, "router", ManualClock(), give_up=stuck.given_up.set, close_s=0.01)
    tracer.close()
    assert stuck.given_up.is_set()


def test_a_collector_that_is_not_there_does_not_keep_a_process_from_ending():
    config = TraceConfig(enabled=True, endpoint="http://127.0.0.1:9")
    tracer = open_tracer(config, "router", ManualClock())
    tracer.begin("a request", parent="", start_s=0.0).end({})
    tracer.close()
    assert not [t for t in threading.enumerate() if t.name == "last spans"]
