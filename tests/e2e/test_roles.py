"""Workers of a served cluster that change their role by command, under requests."""

from tests.e2e.clients import Clients
from tests.e2e.served import Served, eventually, serve


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
        clients = Clients(cluster, 3)
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
