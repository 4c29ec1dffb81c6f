"""How the router is: what /health, /ready, /load and the metrics show of it (a `router.ports.RouterStatus`)."""

from collections.abc import Mapping

from baton.clock import Clock
from router.admission.admission import Admission
from router.generator import ClusterGenerator
from router.ports import WorkerReport
from router.routing.view import ClusterView
from router.timer import PeriodicTimer
from router.workers.links import WorkerLinks


class ClusterStatus:
    """Asks the router's parts.

    Args:
        view: The connected workers.
        generator: Knows what is in flight.
        admission: Knows what waits.
        membership: The links to the workers.
        timer: Moves waits and deadlines.
        clock: Monotonic.
    """

    def __init__(
        self,
        *,
        view: ClusterView,
        generator: ClusterGenerator,
        admission: Admission,
        membership: WorkerLinks,
        timer: PeriodicTimer,
        clock: Clock,
    ) -> None:
        self._view = view
        self._generator = generator
        self._admission = admission
        self._membership = membership
        self._timer = timer
        self._clock = clock

    def ready(self) -> bool:
        """Whether a worker takes new requests: where no other is left, each runs whole ones."""
        return not self._generator.draining and bool(self._view.usable(self._clock.now_s()))

    def healthy(self) -> bool:
        """Whether the timer of waits and deadlines runs and so does every link."""
        return self._timer.healthy() and self._membership.healthy()

    def in_flight(self) -> int:
        """Requests accepted and not finished, queued ones included."""
        return self._generator.in_flight()

    def waiting(self) -> Mapping[str, int]:
        """Queued requests, by the name of their SLO class."""
        return self._admission.waiting()

    def workers(self) -> list[WorkerReport]:
        """The connected workers."""
        now_s = self._clock.now_s()
        return [
            WorkerReport(
                worker_id=worker.identity.worker_id,
                role=worker.hello.role,
                state=self._view.state(worker, now_s),
                in_flight=worker.legs,
                load=worker.load,
            )
            for worker in self._view.workers
        ]
