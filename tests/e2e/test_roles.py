"""Workers of a served cluster that change their role by command, under requests."""

import threading

from tests.e2e.served import Served, eventually, serve

_BODY = {"model": "baton-demo", "prompt": list(range(5, 205)), "temperature": 0, "max_tokens": 24}


class _Clients:
    """Threads that ask again and again until they are stopped; every answer is kept."""

    def __init__(self, cluster: Served, number: int) -> None:
        self.answers: list[tuple[int, str]] = []
        self._cluster = cluster
        self._enough = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        with self._cluster.client() as http:
            while not self._enough.is_set():
                reply = http.post("/v1/completions", json=_BODY)
                self.answers.append((reply.status_code, reply.text))

    def more(self, answers: int) -> None:
        until = len(self.answers) + answers
        eventually(lambda: len(self.answers) >= until, "more answers", 60.0)

    def stop(self) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join(60)


def _roles(cluster: Served) -> dict[str, tuple[str, str]]:
    return {
        worker["worker_id"]: (worker["role"], worker["incarnation"]) for worker in cluster.workers()
    }


def _shows(cluster: Served, name: str, role: str) -> None:
    """Waits until `baton status` shows the worker's new role."""
    eventually(lambda: _roles(cluster)[name][0] == role, "the role is shown")


def test_the_two_workers_of_a_cluster_exchange_their_roles_and_no_request_fails() -> None:
    with serve(None) as cluster:
        before = _roles(cluster)
        (prefill,) = (name for name, (role, _) in before.items() if role == "prefill")
        (decode,) = (name for name, (role, _) in before.items() if role == "decode")
        clients = _Clients(cluster, 3)
        try:
            clients.more(3)
            for name, role in ((prefill, "hybrid"), (decode, "prefill"), (prefill, "decode")):
                assert cluster.told("role", name, role) == {"role": role, "left": 0}
                _shows(cluster, name, role)
                clients.more(6)
        finally:
            clients.stop()
        assert {status for status, _ in clients.answers} == {200}, clients.answers[-1]
        after = _roles(cluster)
        assert after == {
            prefill: ("decode", before[prefill][1]),
            decode: ("prefill", before[decode][1]),
        }
