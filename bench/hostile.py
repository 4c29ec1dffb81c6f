"""What one hostile client costs the others: `python -m bench.hostile [--json FILE] [--only ATTACK ...]`.

A real `baton serve` with a simulated worker (`baton run simulated`). While each attack runs, a canary in a process of
its own asks for `/health` and for a short streamed completion every few milliseconds. Most attacks are bodies of nearly
`router.max_body_bytes`; some are honest requests of the largest size.

Figures, for each attack: `ATTACK_stall_ms`, what the router's event loop does: the longest that the canary waited for
`/health`, or in a completion after its first token, less what it waits at the median when nobody attacks. Parts of that
wait, never taken off it: `ATTACK_loop_cpu_ms`, in which the thread of the event loop computed, and
`ATTACK_run_delay_ms`, in which that thread or the canary could have run while the kernel gave the processors to others;
the rest of it the loop waited for Python's lock, or for nothing. `ATTACK_completion_ms`, the like of the stall for
whole completions, which may also wait for a free worker and count in no stall; `ATTACK_memory_mb`, the router's largest
resident memory while it ran, less what it holds when idle after its start; `ATTACK_children_mb`, the largest of its
child processes together (chat templates, long texts); `ATTACK_status`, the HTTP status of the last reply (0: closed
without one); and `ATTACK_canary_failed`, how many of the canary's requests were not answered with 200.
`worst_stall_ms` and its like are the largest of all attacks. `trailer_names_request`: 1 if a request id
in a trailer came back as that of the request.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from statistics import median

import psutil

from bench.harness.report import Report
from bench.harness.server import serving
from bench.router.canary import Orders, Seen, Wait

MIB = 1024 * 1024
_BODY = 8 * MIB - 4096
_MAX_MODEL_LEN = 1_200_000
_SECRET = "5e" * 32
_CALM_S = 1.0
_LOOK_S = 0.05
_ROUNDS = 2
_TIMEOUT_S = 120.0
_MODEL = "bench"
_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"
_SAID = {"role": "user", "content": "hi"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """What one hostile client sends.

    Attributes:
        name: Of its figures.
        make: Makes what is sent on one connection.
        read_bytes_per_s: How fast the reply is read; None for as fast as it comes.
    """

    name: str
    make: Callable[[], bytes]
    read_bytes_per_s: int | None = None


def main() -> None:
    """Entry point."""
    arguments = _arguments()
    report = Report(
        benchmark="hostile",
        settings={name: value for name, value in vars(arguments).items() if name != "json"},
    )
    attacks = [a for a in ATTACKS if not arguments.only or a.name in arguments.only]
    on_a_words = [a for a in A_WORD_ATTACKS if not arguments.only or a.name in arguments.only]
    with report.written_to(arguments.json):
        for chosen, vocabulary in ((attacks, _demo_model), (on_a_words, _model_of_a_words)):
            if chosen:
                with tempfile.TemporaryDirectory(prefix="baton-bench-") as name:
                    model = vocabulary(Path(name))
                    with _cluster(Path(name), model) as url:
                        _measure(url, chosen, report)
        for figure in ("stall_ms", "loop_cpu_ms", "run_delay_ms", "memory_mb", "children_mb"):
            measured = [v for name, v in report.figures.items() if name.endswith("_" + figure)]
            _note(report, f"worst_{figure}", max(measured))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here")
    names = [attack.name for attack in (*ATTACKS, *A_WORD_ATTACKS)]
    parser.add_argument("--only", nargs="+", choices=names, help="these attacks only")
    return parser.parse_args()


def _measure(url: str, attacks: Sequence[Attack], report: Report) -> None:
    port = int(url.rpartition(":")[2])
    router = _router()
    orders = Orders(port=port, process_id=router.pid, model=_MODEL)
    with _canary(orders):
        time.sleep(_CALM_S)  # warms both up
    with _canary(orders) as calm:
        time.sleep(_CALM_S)
    idle_bytes = router.memory_info().rss
    for attack in attacks:
        sent = attack.make()
        _forget_peak(router)
        with _canary(orders) as seen, _children_bytes(router) as children:
            time.sleep(0.1)
            for _ in range(_ROUNDS):
                reply = _send(port, sent, attack.read_bytes_per_s)
            time.sleep(0.1)
        grown = max(0, _peak_bytes(router) - idle_bytes)
        stall_s, longest = _stall(seen, calm)
        _note(report, f"{attack.name}_stall_ms", stall_s * 1e3)
        _note(report, f"{attack.name}_loop_cpu_ms", longest.loop_cpu_s * 1e3)
        _note(report, f"{attack.name}_run_delay_ms", longest.run_delay_s * 1e3)
        waited_s = max(_wall_s(seen.completions)) - median(_wall_s(calm.completions))
        _note(report, f"{attack.name}_completion_ms", waited_s * 1e3)
        _note(report, f"{attack.name}_memory_mb", grown / MIB)
        _note(report, f"{attack.name}_children_mb", max(children) / MIB)
        _note(report, f"{attack.name}_status", _status(reply))
        if attack.name == "trailers":
            _note(report, "trailer_names_request", float(b"from-a-trailer" in reply))
        _note(report, f"{attack.name}_canary_failed", seen.failed)


def _stall(seen: Seen, calm: Seen) -> tuple[float, Wait]:
    """The longest stall, and the wait that it was."""
    stalls: list[tuple[float, Wait]] = []
    for attacked, before in ((seen.health, calm.health), (seen.gaps, calm.gaps)):
        longest = max(attacked, key=lambda wait: wait.wall_s)
        stalls.append((longest.wall_s - median(_wall_s(before)), longest))
    return max(stalls, key=lambda stall: stall[0])


def _wall_s(waits: Sequence[Wait]) -> list[float]:
    return [wait.wall_s for wait in waits]


def _send(port: int, sent: bytes, read_bytes_per_s: int | None) -> bytes:
    """The reply's beginning. Sending ends where the router closes the connection."""
    with socket.socket() as connection:
        connection.settimeout(_TIMEOUT_S)
        if read_bytes_per_s is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        with suppress(OSError):  # what it answered before it closed can still be read
            connection.sendall(sent)
        return _read(connection, read_bytes_per_s)


def _read(connection: socket.socket, bytes_per_s: int | None) -> bytes:
    reply, begun_s = b"", time.perf_counter()
    try:
        while chunk := connection.recv(MIB if bytes_per_s is None else bytes_per_s // 10):
            reply = (reply + chunk)[:4096] if len(reply) < 4096 else reply
            if bytes_per_s is not None:
                time.sleep(0.1)
                if time.perf_counter() - begun_s > _SLOW_S:
                    break
    except OSError:
        pass
    return reply


def _status(reply: bytes) -> float:
    return float(reply[9:12]) if reply.startswith(b"HTTP/1.1 ") else 0.0


def _note(report: Report, figure: str, value: float) -> None:
    report.figures[figure] = value
    print(f"{figure:40}{value:12.1f}", flush=True)


@contextmanager
def _canary(orders: Orders) -> Iterator[Seen]:
    """A canary that runs inside; what it saw is there after it."""
    command = [sys.executable, "-m", "bench.router.canary"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write(json.dumps(asdict(orders)) + "\n")
    process.stdin.flush()
    seen = Seen()
    yield seen
    printed = process.communicate()[0]
    if process.returncode:
        raise RuntimeError("the canary failed; what it said stands above")
    told = json.loads(printed)
    seen.failed = told.pop("failed")
    for name, waits in told.items():
        setattr(seen, name, [Wait(**wait) for wait in waits])


def _forget_peak(process: psutil.Process) -> None:
    Path(f"/proc/{process.pid}/clear_refs").write_text("5")


def _peak_bytes(process: psutil.Process) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@contextmanager
def _children_bytes(process: psutil.Process) -> Iterator[list[int]]:
    """Resident memory of all its children, looked at again and again inside."""
    seen, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(_LOOK_S):
            with suppress(psutil.NoSuchProcess):
                seen.append(sum(child.memory_info().rss for child in process.children()))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield seen
    finally:
        ended.set()
        looking.join()


def _router() -> psutil.Process:
    children = psutil.Process().children(recursive=True)
    return next(
        child for child in children if "baton_cluster.roles router" in " ".join(child.cmdline())
    )


@contextmanager
def _cluster(directory: Path, model: str) -> Iterator[str]:
    """A router's URL, and two fast workers behind it, each with room for any prompt: one can be the canary's while the
    other computes. They give way to the router where there are too few cores.
    """
    addresses = [f"unix:{directory}/worker{number}.sock" for number in range(2)]
    config = directory / "cluster.yaml"
    cluster = {"prefill_workers": 0, "decode_workers": 0, "workers": addresses, "secret": _SECRET}
    config.write_text(json.dumps({"cluster": cluster | {"runtime_dir": str(directory / "run")}}))
    workers = [
        subprocess.Popen(
            [
                *("nice", sys.executable, "-m", "baton_cluster.cli.main", "run", "simulated"),
                *("--name", f"hybrid-{number}", "--role", "hybrid", "--listen", address),
                *("--prefill-tokens-per-s", "1e7", "--step-s", "0.002"),
            ],
            env=os.environ
            | {
                "BATON_MODEL_MODEL": model,
                "BATON_MODEL_MAX_MODEL_LEN": str(_MAX_MODEL_LEN),
                "BATON_CLUSTER_RUNTIME_DIR": f"{directory}/worker{number}",
                "BATON_CLUSTER_SECRET": _SECRET,
                "BATON_SIMULATED_NUM_BLOCKS": str(2 * _MAX_MODEL_LEN // 16),
                "BATON_ENGINE_ENABLE_PREFIX_CACHING": "false",
                "BATON_LOG_LEVEL": "warning",
            },
        )
        for number, address in enumerate(addresses)
    ]
    try:
        with serving(model, "-f", str(config)) as url:
            yield url
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _demo_model(_: Path) -> str:
    return str(resources.files("baton_engine.demo") / "model")


def _model_of_a_words(directory: Path) -> str:
    """A model whose every token is some letters a: what it says begins every stop string and ends none."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<s>", "</s>", "b", *("a" * length for length in range(1, 14))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    sizes = {"vocab_size": len(words), "max_position_embeddings": 4096, "model_type": "llama"}
    (directory / "config.json").write_text(json.dumps(sizes))
    return str(directory)


def _post(path: str, body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST %b HTTP/1.1" % path.encode(), b"Host: x", b"Content-Type: application/json"]
    lines += [b"Connection: close", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def _chunked(path: str, chunks: bytes) -> bytes:
    lines = [b"POST %b HTTP/1.1" % path.encode(), b"Host: x", b"Content-Type: application/json"]
    lines += [b"Connection: close", b"Transfer-Encoding: chunked"]
    return b"\r\n".join(lines) + b"\r\n\r\n" + chunks


def _filled(
    path: str, head: dict[str, object], field: str, begin: str, part: str, end: str
) -> bytes:
    """A body of nearly the largest size: `head`, and `field` with as many of `part` as fit;
    `{}` in it is their number.
    """
    parts, size, number = [], 0, 0
    while size < _BODY:
        parts.append(part.format(number) if "{}" in part else part)
        size += len(parts[-1]) + 1
        number += 1
    rest = json.dumps({"model": _MODEL, **head})[:-1]
    value = ",".join(parts)
    member = f'"{field}":{begin}{value}{end}' if field else value
    return _post(path, f"{rest},{member}}}".encode())


def _asked(path: str, **fields: object) -> bytes:
    return _post(path, json.dumps({"model": _MODEL, **fields}).encode())


_CHAT_HEAD: dict[str, object] = {"messages": [_SAID], "max_tokens": 1}
_PARTS = [{"type": "text", "text": "x"}] * 13
_SLOW_S = 3.0


def _conversation(path: str, field: str, **fields: object) -> bytes:
    """As many messages with as many parts as an honest client may send."""
    return _asked(path, **{field: [{"role": "user", "content": _PARTS}] * 4000}, **fields)


def _tools() -> list[object]:
    properties = {f"p{i}": {"type": "string", "description": "x" * 20} for i in range(100)}
    schema = {"type": "object", "properties": properties}
    function = {"name": "f", "description": "x", "parameters": schema}
    return [{"type": "function", "function": function}] * 128


def _tiny_chunks() -> bytes:
    return b"1\r\n \r\n" * (2 * MIB) + b"0\r\n\r\n"


def _chunk_extensions() -> bytes:
    return (b"1;" + b"a=b;" * 1000 + b"\r\n \r\n") * 6000 + b"0\r\n\r\n"


def _trailers() -> bytes:
    body = json.dumps({"model": _MODEL, "prompt": "hi", "max_tokens": 1}).encode()
    trailers = b"x-request-id: from-a-trailer\r\n" + b"x: y\r\n" * (40 * MIB // 6)
    return b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailers)


def _short_trailer() -> bytes:
    body = json.dumps({"model": _MODEL, "prompt": "hi", "max_tokens": 1}).encode()
    return b"%x\r\n%b\r\n0\r\nx-request-id: from-a-trailer\r\n\r\n" % (len(body), body)


def _long_text() -> str:
    return "The quick brown fox, and so on. " * (_BODY // 4 // 32)


def _token_ids(count: int) -> list[int]:
    return [5 + i % 1000 for i in range(count)]


ATTACKS = (
    Attack(
        name="metadata",
        make=lambda: _filled(_CHAT, _CHAT_HEAD, "metadata", "{", '"{}":""', "}"),
    ),
    Attack(
        name="logit_bias",
        make=lambda: _filled(_CHAT, _CHAT_HEAD, "logit_bias", "{", '"{}":1', "}"),
    ),
    Attack(name="unknown_keys", make=lambda: _filled(_CHAT, _CHAT_HEAD, "", "", '"u{}":1', "")),
    Attack(name="one_key_often", make=lambda: _filled(_CHAT, _CHAT_HEAD, "", "", '"n":1', "")),
    Attack(
        name="wrong_numbers",
        make=lambda: _filled(_CHAT, _CHAT_HEAD, "stop_token_ids", "[", "1", "]"),
    ),
    Attack(
        name="template_arguments",
        make=lambda: _filled(_CHAT, _CHAT_HEAD, "chat_template_kwargs", '{"a":[', '""', "]}"),
    ),
    Attack(
        name="deep_json",
        make=lambda: _post(_CHAT, b'{"model":"bench","messages":' + b'[{"a":' * (_BODY // 6)),
    ),
    Attack(
        name="wide_json",
        make=lambda: _filled(_CHAT, _CHAT_HEAD, "prediction", "[", "[1,1,1,1]", "]"),
    ),
    Attack(name="empty_strings", make=lambda: _filled(_CHAT, _CHAT_HEAD, "x", "[", '""', "]")),
    Attack(
        name="escaped_text",
        make=lambda: _post(
            _CHAT,
            b'{"model":"bench","max_tokens":1,"messages":[{"role":"user","content":"%b"}]}'
            % (b"\\u00e9" * (_BODY // 6 - 20)),
        ),
    ),
    Attack(
        name="escaped_backslashes",
        make=lambda: _post(_CHAT, b'{"model":"bench","x":"%b"}' % (b"\\\\" * (_BODY // 2 - 30))),
    ),
    Attack(name="long_number", make=lambda: _post(_CHAT, b'{"seed":' + b"1" * _BODY + b"}")),
    Attack(name="long_fraction", make=lambda: _post(_CHAT, b'{"top_p":0.' + b"1" * _BODY + b"}")),
    Attack(name="chunk_extensions", make=lambda: _chunked(_CHAT, _chunk_extensions())),
    Attack(name="tiny_chunks", make=lambda: _chunked(_CHAT, _tiny_chunks())),
    Attack(name="short_trailer", make=lambda: _chunked(_COMPLETION, _short_trailer())),
    Attack(name="trailers", make=lambda: _chunked(_COMPLETION, _trailers())),
    Attack(
        name="long_headers",
        make=lambda: b"GET /health HTTP/1.1\r\nConnection: close\r\n" + b"a: b\r\n" * (4 * MIB),
    ),
    Attack(
        name="many_headers",
        make=lambda: (
            b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n" + b"a:b\r\n" * 12_000 + b"\r\n"
        ),
    ),
    Attack(
        name="long_path",
        make=lambda: b"GET /" + b"%41" * 20_000 + b" HTTP/1.1\r\nConnection: close\r\n\r\n",
    ),
    Attack(
        name="pipelined",
        make=lambda: (
            b"GET /health HTTP/1.1\r\n\r\n" * 100_000
            + b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"
        ),
    ),
    Attack(name="detokenize", make=lambda: _asked("/detokenize", tokens=_token_ids(1_500_000))),
    Attack(
        name="detokenize_halves",  # half characters: what decodes by windows takes longest
        make=lambda: _asked("/detokenize", tokens=[200] * 1_500_000),
    ),
    Attack(name="tokenize", make=lambda: _asked("/tokenize", prompt=_long_text() * 3)),
    Attack(
        name="tokenize_names",
        make=lambda: _asked("/tokenize", prompt=_long_text(), return_token_strs=True),
    ),
    Attack(
        name="long_prompt",
        make=lambda: _asked(_COMPLETION, prompt=_token_ids(1_000_000), max_tokens=2),
    ),
    Attack(
        name="many_prompts",
        make=lambda: _asked(_COMPLETION, prompt=[_token_ids(8_000)] * 128, max_tokens=2),
    ),
    Attack(
        name="long_text",
        make=lambda: _asked(_COMPLETION, prompt=_long_text(), max_tokens=2),
    ),
    Attack(name="messages", make=lambda: _conversation(_CHAT, "messages", max_tokens=2)),
    Attack(
        name="response_items",
        make=lambda: _conversation("/v1/responses", "input", max_output_tokens=2),
    ),
    Attack(
        name="anthropic_messages",
        make=lambda: _conversation("/v1/messages", "messages", max_tokens=2),
    ),
    Attack(
        name="count_tokens", make=lambda: _conversation("/v1/messages/count_tokens", "messages")
    ),
    Attack(
        name="anthropic_unknown",
        make=lambda: _filled("/v1/messages", _CHAT_HEAD, "", "", '"u{}":1', ""),
    ),
    Attack(
        name="response_unknown",
        make=lambda: _filled(
            "/v1/responses", {"input": "hi", "max_output_tokens": 1}, "", "", '"u{}":1', ""
        ),
    ),
    Attack(
        name="tools",
        make=lambda: _asked(
            _CHAT, messages=[_SAID], tools=_tools(), tool_choice="none", max_tokens=2
        ),
    ),
    Attack(
        name="logprob_reply",
        make=lambda: _asked(
            _CHAT, messages=[_SAID], n=128, logprobs=True, top_logprobs=20, max_tokens=200
        ),
    ),
    Attack(
        name="logprob_stream",
        make=lambda: _asked(
            _CHAT,
            messages=[_SAID],
            n=128,
            logprobs=True,
            top_logprobs=20,
            max_tokens=100,
            stream=True,
        ),
    ),
    Attack(
        name="completion_logprob_reply",
        make=lambda: _asked(_COMPLETION, prompt="hi", n=128, logprobs=20, max_tokens=200),
    ),
    Attack(
        name="response_logprob_reply",
        make=lambda: _asked(
            "/v1/responses",
            input="hi",
            include=["message.output_text.logprobs"],
            top_logprobs=20,
            max_output_tokens=10_000,
        ),
    ),
    Attack(
        name="echo_reply",
        make=lambda: _asked(
            _COMPLETION, prompt=_token_ids(6_000), n=128, echo=True, logprobs=20, max_tokens=2
        ),
    ),
    Attack(
        name="prompt_ids_reply",
        make=lambda: _asked(
            _COMPLETION, prompt=_token_ids(500_000), n=32, return_token_ids=True, max_tokens=2
        ),
    ),
    Attack(
        name="slow_reader",
        make=lambda: _asked(_CHAT, messages=[_SAID], n=128, max_tokens=2000, stream=True),
        read_bytes_per_s=20_000,
    ),
)

_STOPS = ["a" * (511 - i) + "b" for i in range(16)]

A_WORD_ATTACKS = (
    Attack(
        name="stop_strings",
        make=lambda: _asked(
            _COMPLETION, prompt="a", n=128, stop=_STOPS, max_tokens=300, ignore_eos=True
        ),
    ),
    Attack(
        name="stop_strings_stream",
        make=lambda: _asked(
            _COMPLETION,
            prompt="a",
            n=128,
            stop=_STOPS,
            max_tokens=300,
            ignore_eos=True,
            stream=True,
        ),
    ),
    Attack(
        name="stop_strings_logprobs",
        make=lambda: _asked(
            _COMPLETION,
            prompt="a",
            n=128,
            stop=_STOPS,
            max_tokens=200,
            ignore_eos=True,
            stream=True,
            logprobs=15,
        ),
    ),
)
"""Those that need a model which says what begins a stop string."""


if __name__ == "__main__":
    main()
