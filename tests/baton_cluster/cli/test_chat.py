import io
import json
from collections.abc import Iterator
from dataclasses import asdict

import httpx
import pytest

from baton_cluster.cli.chat import printable
from baton_cluster.cli.completions import (
    ChatMessage,
    Piece,
    ReportedTiming,
    ReportedUsage,
    Text,
    stream_chat,
)
from baton_cluster.cli.main import main
from tests.baton_cluster.cli.chat_server import DONE, ChatServer, chunk, serving

TIMING = ReportedTiming(
    prefill_worker="prefill-0",
    decode_worker="decode-0",
    route_s=0.001,
    queue_s=0.002,
    prefill_s=0.003,
    first_token_s=0.004,
    handoff_s=0.005,
    unhidden_s=0.006,
    decode_s=0.007,
    total_s=0.008,
    prompt_tokens=9,
    cached_tokens=1,
    output_tokens=10,
    blocks_sent=11,
    bytes_sent=12,
)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with serving() as told:
        yield told


@pytest.fixture
def typed(monkeypatch):
    """Makes standard input a terminal at which these lines are typed."""

    def lines(*wanted: str | type[KeyboardInterrupt]):
        class Terminal(io.StringIO):
            def isatty(self):
                return True

        left = iter(wanted)

        def read(_prompt):
            match next(left, EOFError):
                case str(line):
                    return line
                case key:
                    raise key

        monkeypatch.setattr("sys.stdin", Terminal())
        monkeypatch.setattr("builtins.input", read)

    return lines


def pieces_of(*stream: bytes) -> list[Piece]:
    def answer(_request):
        return httpx.Response(200, content=iter(stream))

    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://x") as client:
        messages = [ChatMessage(role="user", content="?")]
        return list(stream_chat(client, model="tiny", messages=messages))


def test_a_stream_is_read_however_its_bytes_are_cut():
    whole = chunk("né") + b": a comment\n\n" + chunk("e\u2028\n") + DONE
    for size in (1, 2, 7, 1000):
        parts = [whole[at : at + size] for at in range(0, len(whole), size)]
        assert pieces_of(*parts) == [Text(text="né"), Text(text="e\u2028\n")]


def test_usage_and_the_routers_own_timing_are_told():
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5, "more": {}}}
    pieces = pieces_of(
        b"data: " + json.dumps(usage).encode() + b"\r\n\r\n",
        b": baton " + json.dumps(asdict(TIMING)).encode() + b"\n\n",
        DONE,
    )
    assert pieces == [ReportedUsage(prompt_tokens=3, completion_tokens=5), TIMING]


def test_off_a_terminal_standard_input_is_one_question_and_only_the_answer_is_printed(
    server, monkeypatch, capsys
):
    monkeypatch.setattr("sys.stdin", io.StringIO("What?\nReally?\n"))
    assert main(["chat", "--url", server.url + "/v1", "--system", "Be brief."]) == 0
    assert capsys.readouterr().out == "Hello\n"
    [request] = server.requests
    assert request["model"] == "tiny"
    assert request["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What?\nReally?\n"},
    ]


def test_on_a_terminal_the_conversation_is_remembered_until_reset(server, typed, capsys):
    typed("one", "two", "/reset", "three", "/exit", "four")
    assert main(["chat", "--url", server.url, "--model", "m"]) == 0
    said = [[turn["content"] for turn in request["messages"]] for request in server.requests]
    assert said == [["one"], ["one", "Hello", "two"], ["three"]]
    assert "first token after" in capsys.readouterr().out


def test_ctrl_c_at_the_prompt_drops_the_line_and_not_the_conversation(server, typed, capsys):
    typed("one", KeyboardInterrupt, "two")
    assert main(["chat", "--url", server.url, "--model", "m"]) == 0
    asked = [turn["content"] for turn in server.requests[-1]["messages"]]
    assert asked == ["one", "Hello", "two"]
    assert capsys.readouterr().out.endswith("\n\n"), "the shell's prompt gets a line of its own"


def test_the_key_is_sent_as_a_bearer_token(server, typed):
    typed("hi")
    assert main(["chat", "--url", server.url, "--api-key", "k"]) == 0
    assert server.headers[0]["Authorization"] == "Bearer k"


def test_an_error_of_the_server_is_shown_and_the_conversation_goes_on(server, typed, capsys):
    typed("one", "two")
    server.stream = [chunk("par"), b'data: {"error": {"message": "worker lost"}}\n\n']
    assert main(["chat", "--url", server.url]) == 0
    assert capsys.readouterr().out.count("worker lost") == 2
    assert [len(request["messages"]) for request in server.requests] == [1, 1]


def test_a_refused_question_off_a_terminal_is_one_line(server, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("What?"))
    server.status, server.stream = 404, [b'{"error": {"message": "no such model"}}']
    assert main(["chat", "--url", server.url]) == 1
    shown = capsys.readouterr()
    assert shown.err == "baton: error: the server answers 404: no such model\n"


def test_a_server_that_is_not_there_is_one_line(capsys):
    assert main(["chat", "--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("baton: error: cannot reach http://127.0.0.1:1")


@pytest.mark.parametrize("url", ["http://127.0.0.1:port", "http://[::1"])
def test_a_url_that_is_none_is_one_line(capsys, url):
    assert main(["chat", "--url", url]) == 2
    assert capsys.readouterr().err.startswith(f"baton: error: --url {url}: Invalid")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ALL_PROXY", "gopher://127.0.0.1:1", "gopher"),
        ("SSL_CERT_FILE", "/nowhere", "No such file"),
    ],
)
def test_a_proxy_or_certificates_that_cannot_be_used_are_one_line(
    server, monkeypatch, capsys, name, value, said
):
    monkeypatch.setenv(name, value)
    assert main(["chat", "--url", server.url]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("baton: error: the environment's proxy or certificates: ")
    assert said in shown
    assert shown.count("\n") == 1


def test_what_a_model_says_cannot_steer_the_terminal():
    assert printable("a\x1b[2Jb\x9b1m\tc\nd\r") == "a[2Jb1m\tc\nd"
