import grpc
import pytest

from baton.rpc.v1 import control_pb2 as pb
from baton_cluster.cli.main import main
from tests.baton_cluster.cli.fake_control import FakeControl, answering


class Router(FakeControl):
    """Has a worker `decode-0` that drains at once, and `decode-1`, the last of its kind."""

    def Drain(self, request, context):  # noqa: N802
        self.asked = request
        if request.worker == "decode-1" and not request.force:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "without decode-1 no worker")
        return pb.DrainReply(drained=True)

    def Undrain(self, request, context):  # noqa: N802
        self.asked = request
        return pb.UndrainReply()


def test_a_drain_tells_the_router_who_asks_and_why(home, capsys):
    router = Router()
    with answering(router, home / "run") as runtime:
        where = ["--runtime-dir", str(runtime.path)]
        assert main(["drain", "decode-0", "--reason", "new disk", *where]) == 0
        assert router.asked.by.endswith(", new disk")
        assert "takes nothing new" in capsys.readouterr().out
        assert main(["undrain", "decode-0", *where]) == 0
        assert router.asked.worker == "decode-0"


def test_a_refused_drain_is_one_line_and_goes_by_force(home, capsys):
    with answering(Router(), home / "run") as runtime:
        where = ["--runtime-dir", str(runtime.path)]
        assert main(["drain", "decode-1", *where]) == 1
        assert "baton: error: without decode-1 no worker" in capsys.readouterr().err
        assert main(["drain", "decode-1", "--force", *where]) == 0


@pytest.mark.parametrize(
    "argv",
    [
        ["drain", ""],
        ["undrain", ""],
        ["role", "", "decode"],
        ["explain", ""],
        ["explain", "", "--story"],
        ["pool", "flush", "--tenant", "", "--model", "m"],
    ],
)
def test_an_empty_name_as_of_an_unset_variable_is_refused_before_anything_is_asked(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "must not be empty" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["drain", "decode-0"], ["role", "decode-0", "hybrid"]])
@pytest.mark.parametrize("seconds", ["inf", "nan", "1e30", "-1", "86400.5", "soon"])
def test_a_timeout_that_cannot_be_waited_for_is_refused_with_the_limit(argv, seconds, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*argv, f"--timeout={seconds}"])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert f"argument --timeout: must be from 0 to 86400 seconds, not '{seconds}'" in shown
    assert shown.count("\n") == 1


def test_a_drain_may_take_a_day(home):
    router = Router()
    with answering(router, home / "run") as runtime:
        argv = ["drain", "decode-0", "--timeout", "86400", "--runtime-dir", str(runtime.path)]
        assert main(argv) == 0
        assert router.asked.timeout_s == 86400
