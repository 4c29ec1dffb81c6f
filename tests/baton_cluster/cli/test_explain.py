import asyncio
import io
import json
import time
from collections.abc import Iterator

import pytest
from google.protobuf.json_format import Parse
from rich.console import Console

from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import control_pb2 as pb
from baton.story import StoryLog
from baton_cluster.cli.explain import render
from baton_cluster.cli.main import main
from baton_cluster.launch.child_stories import serve_stories
from baton_cluster.launch.runtime_dir import RuntimeDir
from tests.baton_cluster.cli.fake_control import FakeControl, answering

REPLY = pb.ExplainReply(
    known=True,
    policy="predictive",
    kind="on_decode",
    prefill_worker="decode-0",
    decode_worker="decode-0",
    tokens=100,
    held_by_prefill=80,
    held_by_decode=80,
    output_tokens=32,
    decisions=1,
    why="the least predicted seconds",
    considered=[pb.ConsideredPair(prefill_worker="decode-0", decode_worker="decode-0", cost=0.5)],
    predicted=pb.PredictedTimes(queue_s=0.25, prefill_s=0.125, tbt_s=0.02),
)

STORY = common_pb2.StoryReply(
    entries=[
        common_pb2.StoryEntry(at_s=7.0, event="admitted", process="router", core="admission"),
        common_pb2.StoryEntry(
            at_s=7.25,
            event="placed",
            actions=["SendLeg(leg_id=1)", "Send", "Send"],
            process="router",
            core="dispatch",
        ),
        common_pb2.StoryEntry(at_s=7.3, event="asked", process="h0", core="leg"),
    ],
    now_s=8.0,
)


@pytest.fixture
def router(home) -> Iterator[RuntimeDir]:
    control = FakeControl(explained={"cmpl-1": REPLY}, stories={"cmpl-1": STORY, "planner": STORY})
    with answering(control, home / "run") as runtime:
        yield runtime


def shown(reply: pb.ExplainReply) -> str:
    console = Console(width=200, file=io.StringIO(), force_terminal=False)
    for part in render(reply, "cmpl-1"):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_people_see_who_why_and_how_long():
    text = shown(REPLY)
    assert "decode on decode-0" in text
    assert "predicted to be better" in text
    assert "250.0 ms" in text
    assert "80 were believed" in text


def test_a_request_that_ended_shows_what_was_measured():
    ended = pb.ExplainReply()
    ended.CopyFrom(REPLY)
    ended.measured.first_token_s = 0.75
    assert "750.0 ms" in shown(ended)
    assert "750.0 ms" not in shown(REPLY)


def test_the_command_asks_the_router(router, capsys):
    assert main(["explain", "cmpl-1", "--runtime-dir", str(router.path), "--json"]) == 0
    assert Parse(capsys.readouterr().out, pb.ExplainReply()) == REPLY


def test_the_json_is_an_object_with_the_fields_of_the_message(router, capsys):
    main(["explain", "cmpl-1", "--runtime-dir", str(router.path), "--json"])
    assert json.loads(capsys.readouterr().out)["kind"] == "on_decode"


def test_an_unknown_request_is_one_line(router, capsys):
    assert main(["explain", "cmpl-2", "--runtime-dir", str(router.path)]) == 1
    assert "does not know cmpl-2" in capsys.readouterr().err


def test_a_story_is_told_event_by_event(router, capsys):
    assert main(["explain", "cmpl-1", "--story", "--runtime-dir", str(router.path)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("cmpl-1: from ")
    assert head.endswith(" UTC on, in router, h0")
    assert lines == [
        "       0.0 ms  router  admission  admitted",
        "     250.0 ms  router  dispatch   placed",
        "                                  -> SendLeg(leg_id=1)",
        "                                  -> Send, 2 times",
        "     300.0 ms  h0      leg        asked",
    ]


def test_a_story_as_json_is_the_message(router, capsys):
    main(["explain", "cmpl-1", "--story", "--json", "--runtime-dir", str(router.path)])
    assert Parse(capsys.readouterr().out, common_pb2.StoryReply()) == STORY


def test_the_story_of_an_unknown_request_is_one_line(router, capsys):
    assert main(["explain", "cmpl-2", "--story", "--runtime-dir", str(router.path)]) == 1
    assert "neither the router nor a worker knows cmpl-2" in capsys.readouterr().err


def test_the_planner_is_explained_in_place_of_a_request(router, capsys):
    status = main(["explain", "--planner", "--runtime-dir", str(router.path)])
    assert (status, capsys.readouterr().out.splitlines()[0].partition(":")[0]) == (0, "planner")


@pytest.mark.parametrize("words", [("cmpl-1", "--planner"), ()])
def test_either_a_request_or_the_planner_is_explained(router, capsys, words):
    assert main(["explain", *words, "--runtime-dir", str(router.path)]) == 2
    assert "either a REQUEST_ID or --planner" in capsys.readouterr().err


def test_where_there_is_no_planner_that_is_said(home, capsys):
    with answering(FakeControl(), home / "run") as runtime:
        assert main(["explain", "--planner", "--runtime-dir", str(runtime.path)]) == 1
    assert "roles.planner is off" in capsys.readouterr().err


def test_the_story_of_a_process_is_the_launchers(router, capsys):
    log = StoryLog("supervisor")
    log.record("decode-0", time.monotonic(), "ChildExited(returncode=-9)", ("AnnounceRestart",))

    async def explain() -> int:
        server = await serve_stories(router.path, log.story)
        argv = ["explain", "decode-0", "--story", "--runtime-dir", str(router.path)]
        async with server:
            return await asyncio.to_thread(main, argv)

    assert asyncio.run(explain()) == 0
    head, exited, restart = capsys.readouterr().out.splitlines()
    assert head.endswith("in supervisor")
    assert exited.split() == ["0.0", "ms", *2 * ["supervisor"], "ChildExited(returncode=-9)"]
    assert restart.strip() == "-> AnnounceRestart"


def test_a_request_is_not_looked_for_among_the_processes_only(router, capsys):
    async def explain() -> int:
        argv = ["explain", "cmpl-1", "--story", "--runtime-dir", str(router.path)]
        async with await serve_stories(router.path, StoryLog("supervisor").story):
            return await asyncio.to_thread(main, argv)

    assert asyncio.run(explain()) == 0
    assert "SendLeg(leg_id=1)" in capsys.readouterr().out
