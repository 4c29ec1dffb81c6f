from collections.abc import Iterator

import pytest

from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import control_pb2 as pb
from baton_cluster.cli.main import main
from baton_cluster.launch.runtime_dir import RuntimeDir
from tests.baton_cluster.cli.fake_control import FakeControl, answering

pytestmark = pytest.mark.alone


@pytest.fixture
def cluster(home) -> Iterator[RuntimeDir]:
    """One whose worker `hybrid-0` answers at the router's own address."""
    control = FakeControl(status=pb.StatusReply())
    with answering(control, home / "run") as runtime:
        control.status = pb.StatusReply(
            workers=[
                pb.WorkerStatus(
                    identity=common_pb2.WorkerIdentity(worker_id="hybrid-0", incarnation=1),
                    address=runtime.socket_address("router"),
                )
            ]
        )
        yield runtime


def role(cluster: RuntimeDir, *words: str) -> int:
    return main(["role", *words, "--runtime-dir", str(cluster.path)])


def test_the_worker_is_asked_by_its_name_and_says_what_it_is_now(cluster, capsys):
    assert role(cluster, "hybrid-0", "decode") == 0
    assert capsys.readouterr().out == "hybrid-0 is a decode worker now\n"


def test_a_worker_that_does_not_finish_in_time_stays_what_it_was(cluster, capsys):
    assert role(cluster, "hybrid-0", "decode", "--timeout", "0.5") == 1
    assert "still a hybrid worker: 2 legs" in capsys.readouterr().err


def test_an_unknown_worker_is_one_line_with_those_that_are_there(cluster, capsys):
    assert role(cluster, "prefill-7", "decode") == 1
    error = capsys.readouterr().err
    assert "no worker prefill-7" in error
    assert "hybrid-0" in error


def test_a_role_that_is_none_is_refused_before_anything_is_asked(cluster, capsys):
    with pytest.raises(SystemExit):
        role(cluster, "hybrid-0", "router")
    assert "invalid choice" in capsys.readouterr().err
