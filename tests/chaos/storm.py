"""A storm: traffic on a served cluster while a seeded hand does some harm every second."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import psutil

from baton_cluster.cli.status import fetch
from baton_cluster.launch.runtime_dir import ROUTER_SOCKET
from tests.chaos.process import ProcessFaults
from tests.chaos.traffic import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """How hard it blows.

    Attributes:
        interval_s: Time between two faults.
        kill: Weight of a SIGKILL.
        stop: Weight of a SIGSTOP that ends with a SIGCONT.
        leave: Weight of a client that hangs up.
        longest_stop_s: Stops last up to this long.
    """

    interval_s: float = 1.0
    kill: float = 0.3
    stop: float = 0.4
    leave: float = 0.3
    longest_stop_s: float = 12.0


@dataclass(slots=True, eq=False)
class Storm:
    """Does harm until told to end; then lets everything run that it stopped.

    Attributes:
        faults: What does the harm to the workers, and the proof of it.
        traffic: Whose clients hang up.
        rng: Decides.
        weather: How hard it blows.
        hung_up: Clients made to leave.
    """

    faults: ProcessFaults
    traffic: Traffic
    rng: random.Random
    weather: Weather = field(default_factory=Weather)
    hung_up: int = 0
    _stopped: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def blow(self, calm: asyncio.Event) -> None:
        """One fault after the other until `calm`."""
        while not calm.is_set():
            try:
                async with asyncio.timeout(self.weather.interval_s):
                    await calm.wait()
            except TimeoutError:
                await self._strike()
        await asyncio.gather(*self._stopped.values())

    def counts(self) -> Counter[str]:
        """How often each kind of fault happened, by proof."""
        return self.faults.happened + Counter({"leave": self.hung_up})

    async def _strike(self) -> None:
        weather = self.weather
        kinds = {"kill": weather.kill, "stop": weather.stop, "leave": weather.leave}
        kind = self.rng.choices(list(kinds), weights=list(kinds.values()))[0]
        joined = await self._joined()
        serving = [name for name in joined if name not in self._stopped]
        if kind == "leave" or not serving:
            self.hung_up += self.traffic.hang_up(self.rng)
            return
        worker = self.rng.choice(serving)
        if kind == "kill" and _has_a_twin(worker, serving):
            await asyncio.to_thread(self.faults.kill, worker)
        else:
            await self._stop(worker, self.rng.uniform(0.1, weather.longest_stop_s))

    async def _joined(self) -> list[str]:
        """Workers that the router has: one that is still starting is spared, however slow the machine is."""
        status = await fetch(f"unix:{self.faults.served.runtime_dir / ROUTER_SOCKET}")
        return sorted(worker.worker_id for worker in status.workers if worker.worker_id)

    async def _stop(self, worker: str, for_s: float) -> None:
        victim = await asyncio.to_thread(self.faults.stop, worker)
        self._stopped[worker] = asyncio.create_task(self._resume(worker, victim, for_s))

    async def _resume(self, worker: str, victim: psutil.Process, for_s: float) -> None:
        await asyncio.sleep(for_s)
        await asyncio.to_thread(self.faults.resume, victim)
        del self._stopped[worker]


def _has_a_twin(worker: str, serving: list[str]) -> bool:
    """Whether another worker of its role serves. The last one is stopped, not killed: where a restart takes long there
    would be no cluster at all for most of the time, and requests rightly refused prove nothing.
    """
    role = worker.rsplit("-", 1)[0]
    return any(other != worker and other.rsplit("-", 1)[0] == role for other in serving)
