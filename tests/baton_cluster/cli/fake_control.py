"""A router's control service that answers what it is told to, in a runtime directory of its own."""

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc

from baton.rpc.v1 import common_pb2, control_pb2, control_pb2_grpc
from baton_cluster.launch.runtime_dir import RuntimeDir
from tests.waits import WAIT_S


class FakeControl(control_pb2_grpc.ControlServicer):
    """Args:
    status: What it says of its cluster.
    explained: What it knows of requests, by their ids.
    stories: What happened to requests, by their ids.
    """

    def __init__(
        self,
        status: control_pb2.StatusReply | None = None,
        explained: dict[str, control_pb2.ExplainReply] | None = None,
        stories: dict[str, common_pb2.StoryReply] | None = None,
    ) -> None:
        self.status = status
        self._explained = explained or {}
        self._stories = stories or {}

    def Status(self, request, context):  # noqa: N802  # as gRPC names it
        return self.status

    def Drain(self, request, context):  # noqa: N802
        raise NotImplementedError

    def Undrain(self, request, context):  # noqa: N802
        raise NotImplementedError

    def SetRole(self, request, context):  # noqa: N802
        """As a router whose only worker `hybrid-0` has two legs that go on for longer than a second."""
        if request.worker != "hybrid-0":
            context.abort(grpc.StatusCode.NOT_FOUND, f"no worker {request.worker}: hybrid-0")
        if request.role == common_pb2.ROLE_PREFILL and not request.force:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "none would be left that decodes")
        stays = request.timeout_s < 1.0
        role = common_pb2.ROLE_HYBRID if stays else request.role
        return control_pb2.SetRoleReply(role=role, changed=not stays, left=2 * stays)

    def HoldPlanner(self, request, context):  # noqa: N802
        """As a router whose planner can be held, and is not to go on."""
        if not request.held:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another router plans")
        return control_pb2.HoldPlannerReply()

    def Scale(self, request, context):  # noqa: N802
        """As a router whose launcher has one prefill and two decode workers, and may have eight."""
        before = {"prefill": 1, "decode": 2, "hybrid": 0}
        now = before | dict(request.pools)
        if sum(now.values()) > 8:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "cluster.max_workers is 8")
        return control_pb2.ScaleReply(before=before, now=now)

    def Explain(self, request, context):  # noqa: N802
        return self._explained.get(request.request_id, control_pb2.ExplainReply())

    def Story(self, request, context):  # noqa: N802
        return self._stories.get(request.request_id, common_pb2.StoryReply())


@contextmanager
def answering(control: FakeControl, path: Path) -> Iterator[RuntimeDir]:
    """The directory at `path` as the router's that `control` plays."""
    runtime = RuntimeDir.claim(path)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    control_pb2_grpc.add_ControlServicer_to_server(control, server)
    server.add_insecure_port(runtime.socket_address("router"))
    server.start()
    yield runtime
    assert server.stop(None).wait(WAIT_S)
    runtime.release()
