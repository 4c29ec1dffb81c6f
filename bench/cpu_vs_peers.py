"""Ours beside other servers on this machine's CPU, over HTTP: `python -m bench.cpu_vs_peers [--json FILE]`.

Servers take turns on the same cores with the same random weights and prompts: a hybrid worker, one prefill and one
decode worker, vLLM's CPU backend (`--vllm-python`), transformers, and llama.cpp (`--llamacpp-server`), for which the
model is written as GGUF. `bench.peers.contenders` lists them, and `bench.peers.figures` names the figures. A server
that does not come up, or fails, is absent: the report says why, and the others go on.

What takes long runs in parts, which `--merge` puts into one report. Both sides of a ratio belong in one part:

    python -m bench.cpu_vs_peers --only hybrid vllm --no-prompts --vllm-python PATH --json a.json
    python -m bench.cpu_vs_peers --only hybrid hybrid_paced pd --concurrency --json b.json
    python -m bench.cpu_vs_peers --merge a.json b.json --json all.json
"""

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

from bench.harness.parts import merge_parts
from bench.harness.report import Report, write_document
from bench.harness.shapes import SHAPES, write_model
from bench.harness.stopping import stoppable
from bench.peers.contenders import NAMES, OURS, Terms, contenders
from bench.peers.contest import Contest, Sizes
from bench.peers.figures import over_all_shapes, peer_figures

_SHAPES = ("llama116m", "qwen370m")
_NO_SETTINGS = {"json", "merge", "vllm_python", "llamacpp_server"}
"""Where something lies on one machine; the report lists absent servers itself."""


@stoppable()
def main() -> None:
    """Entry point."""
    arguments = _arguments()
    if arguments.merge:
        try:
            document = merge_parts(arguments.merge, partial(over_all_shapes, shapes=SHAPES))
        except (OSError, ValueError) as error:
            sys.exit(str(error))
        write_document(document, arguments.json)
        return
    settings = {name: value for name, value in vars(arguments).items() if name not in _NO_SETTINGS}
    report = Report(benchmark="cpu_vs_peers", settings=settings)
    absent: dict[str, str] = {}
    for shape in arguments.shape:
        _compare(shape, arguments, report, absent)
    if failed := [who for who in absent if who.split()[-1] in OURS]:
        sys.exit(f"ours failed: {', '.join(failed)}")


def _compare(
    shape: str, arguments: argparse.Namespace, report: Report, absent: dict[str, str]
) -> None:
    """Measures one shape; writes the report after each turn, so that a time limit leaves what there is."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        write_model(SHAPES[shape], Path(directory))
        entries = contenders(Path(directory), _terms(arguments))
        chosen = {name: entries[name] for name in NAMES if name in arguments.only}
        contest = Contest(shape, chosen, _sizes(shape, arguments))
        for _ in contest.run(arguments.rounds):
            absent |= {f"{shape} {name}": reason for name, reason in contest.absent.items()}
            report.settings["absent"] = [f"{who}: {reason}" for who, reason in absent.items()]
            report.figures |= peer_figures(shape, contest.measured)
            report.figures |= over_all_shapes(report.figures, SHAPES)
            if arguments.json:
                report.write(arguments.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--json", type=Path, help="write the report here")
    add("--merge", type=Path, nargs="+", help="reports of parts to put into one; nothing is run")
    add("--shape", choices=sorted(SHAPES), nargs="+", default=list(_SHAPES))
    add("--only", choices=NAMES, nargs="+", default=list(NAMES), help="servers that take part")
    add("--dtype", default="auto", help="of ours: auto holds the checkpoint's bfloat16 weights")
    add("--tbt-target", type=float, default=0.1, help="seconds, of hybrid_paced")
    add("--vllm-python", default="", help="python of vLLM's environment")
    add("--llamacpp-server", default="", help="path of llama-server")
    add("--concurrency", type=int, nargs="*", default=[1, 8, 32])
    add("--rounds", type=int, default=1, help="turns of each server")
    add("--requests", type=int, default=1, help="per client and turn; of one client three times")
    add("--input-tokens", type=int, default=256)
    add("--output-tokens", type=int, default=64)
    add("--prompt-tokens", type=int, default=2048, help="of prompts that keep arriving")
    add("--prompt-clients", type=int, default=4, help="that decode meanwhile")
    add("--no-prompts", action="store_true", help="leave out prompts that keep arriving")
    arguments = parser.parse_args()
    if arguments.merge and not arguments.json:
        parser.error("--merge needs --json")
    return arguments


def _terms(arguments: argparse.Namespace) -> Terms:
    return Terms(
        dtype=arguments.dtype,
        tbt_target_s=arguments.tbt_target,
        clients=arguments.concurrency,
        vllm_python=arguments.vllm_python,
        llamacpp_server=arguments.llamacpp_server,
    )


def _sizes(shape: str, arguments: argparse.Namespace) -> Sizes:
    return Sizes(
        vocab=SHAPES[shape].vocab,
        requests=arguments.requests,
        input_tokens=arguments.input_tokens,
        output_tokens=arguments.output_tokens,
        prompt_tokens=0 if arguments.no_prompts else arguments.prompt_tokens,
        prompt_clients=arguments.prompt_clients,
    )


if __name__ == "__main__":
    main()
