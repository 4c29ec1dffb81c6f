"""Process faults on a served cluster: kill, stop and continue a worker by name, each with proof that it happened."""

from collections import Counter
from dataclasses import dataclass, field

import psutil

from tests.e2e.served import Served, eventually, is_gone

PROOF_TIMEOUT_S = 10.0


def is_stopped(process: psutil.Process) -> bool:
    """Whether the process is held by SIGSTOP."""
    return not is_gone(process) and process.status() == psutil.STATUS_STOPPED


@dataclass(slots=True, eq=False)
class ProcessFaults:
    """Does harm to the workers of one cluster. Every method returns only once the kernel shows what it did.

    Attributes:
        served: The cluster.
        happened: How often each fault happened, as the state of the process proved.
    """

    served: Served
    happened: Counter[str] = field(default_factory=Counter)

    def find(self, worker: str) -> psutil.Process | None:
        """The process that runs this worker now; None while it is away."""
        for process in self.served.children():
            try:
                if process.cmdline()[-4:-2] == ["--name", worker] and not is_gone(process):
                    return process
            except psutil.NoSuchProcess:
                continue
        return None

    def process(self, worker: str) -> psutil.Process:
        """The process that runs this worker, waiting for a restart if need be."""
        eventually(lambda: self.find(worker) is not None, f"{worker} has a process", 60.0)
        found = self.find(worker)
        assert found is not None
        return found

    def kill(self, worker: str) -> psutil.Process:
        """SIGKILL, and waits until the process is gone."""
        victim = self.process(worker)
        victim.kill()
        eventually(lambda: is_gone(victim), f"{worker} is dead", PROOF_TIMEOUT_S)
        self.happened["kill"] += 1
        return victim

    def stop(self, worker: str) -> psutil.Process:
        """SIGSTOP, and waits until the process stands still. It can be continued whatever has become of it."""
        victim = self.process(worker)
        victim.suspend()
        eventually(lambda: is_stopped(victim), f"{worker} stands still", PROOF_TIMEOUT_S)
        self.happened["stop"] += 1
        return victim

    def resume(self, victim: psutil.Process) -> None:
        """SIGCONT; nothing for a process that has been killed meanwhile."""
        if is_gone(victim):
            return
        victim.resume()
        eventually(lambda: not is_stopped(victim), f"{victim.pid} runs again", PROOF_TIMEOUT_S)
        self.happened["resume"] += 1
