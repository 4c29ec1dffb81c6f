"""Everything that a GPU has to tell about Baton, in one command and ten minutes:
`python -m bench.gpu_day [--json FILE]`.

Stage after stage, each in a process of its own with a deadline, so that what breaks or hangs costs its own figures
only; the report is written after each of them. What the engine, its kernels and the hand-off need is enough: torch,
Triton, numpy, psutil, grpcio, xxhash, pytest.

    ceilings      versions; rates of a copy, of reading and of a product
    compile       all kernels, several at a time
    correctness   against float64 per token and head; graphs against eager steps; plan-ahead; a small model's tokens
    steps         decode steps and prompts as a share of what the device allows
    handoff       pages between two processes on one GPU, against a copy within it (`bench.handoff_gpu`)
    tests         those marked `gpu` of the engine and the hand-off
    loop          sequences through the engine's loop
    kernels       each kernel alone
    digest        torch's profile of a step
    twins         what holds the kernels against torch: 8 bits, windows, other heads, draws, page moves

Figures of the goals: `correct` (1 if all is right), `decode_roofline_b1` and `_b64` (0.75), `prefill_peak_2k` (0.6) and
`_8k`, `handoff_over_copy_64k` and `_1m` (0.8 from 256 KiB on; one push of 8 GiB), `tests_failed`, `twins_failed`,
`stages_failed`. Without a GPU every stage runs in miniature, on host memory and under Triton's interpreter: `on_gpu` is
0, and no figure says anything about a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from bench.gpu.figures import written_to
from bench.gpu.host_driver import build_host_driver
from bench.gpu.stages import STAGES
from bench.harness.report import Report

_ROOT = Path(__file__).resolve().parents[1]
_LIMITS_S = {
    "ceilings": 45.0,
    "compile": 150.0,
    "correctness": 150.0,
    "steps": 120.0,
    "handoff": 90.0,
    "tests": 120.0,
    "loop": 90.0,
    "kernels": 60.0,
    "digest": 60.0,
    "twins": 150.0,
}
_GONE_S = 10.0
_PAGES = ("16k", "64k", "256k", "1m", "8m")
_LARGE_PAGES = ("64k", "256k", "1m")
_TWINS = (
    *("triton_attention", "triton_draw", "triton_few_rows", "triton_fused", "triton_matmul"),
    *("page_move", "page_sum"),
)


def main() -> None:
    """Entry point: exit status 1 where a stage failed or something is not right."""
    arguments = _arguments()
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    report = Report(benchmark="gpu_day", settings=settings)
    report.figures |= {"on_gpu": float(torch.cuda.is_available()), "stages_failed": 0.0}
    end_s = time.monotonic() + arguments.limit_s
    keep = written_to(report, arguments.json)
    # What did not end with its stage may still write to it.
    with tempfile.TemporaryDirectory(prefix="baton-bench-", ignore_cleanup_errors=True) as folder:
        day = Day(Path(folder))
        for name in arguments.stages:
            limit_s = min(_LIMITS_S[name], end_s - time.monotonic())
            print(f"\n== {name}, {max(0.0, limit_s):.0f} s at most", flush=True)
            if limit_s <= 0 or not day.run(name, limit_s, report.figures):
                report.figures["stages_failed"] += 1
                print(f"== {name} failed" if limit_s > 0 else "== no time is left", flush=True)
            if "correctness" in arguments.stages:
                report.figures["correct"] = float(_is_correct(report.figures))
            keep({})
    of = "" if torch.cuda.is_available() else "   (not of a GPU)"
    print()
    for figure, value in sorted(report.figures.items()):
        print(f"{figure:52} {value:14.4f}{of}")
    sys.exit(1 if report.figures["stages_failed"] or not report.figures.get("correct", 1) else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here, after every stage")
    parser.add_argument("--stages", nargs="+", choices=_LIMITS_S, default=list(_LIMITS_S))
    parser.add_argument("--limit-s", type=float, default=585.0, help="for all stages together")
    return parser.parse_args()


def _is_correct(figures: dict[str, float]) -> bool:
    """All that was held against something exact was right, and nothing was left out."""
    checked = {name: value for name, value in figures.items() if name.startswith("correct_")}
    return "correct_tokens" in checked and all(checked.values())


@dataclass(frozen=True, slots=True)
class Day:
    """Runs stages.

    Attributes:
        folder: For what they leave to be read.
    """

    folder: Path

    def run(self, name: str, limit_s: float, figures: dict[str, float]) -> bool:
        """Runs one stage and takes its figures, also those of one that broke off; whether it ran to its end.

        Raises nothing: what cannot be started, or leaves what cannot be read, has failed.
        """
        try:
            return self._run(name, limit_s, figures)
        except Exception:  # noqa: BLE001 - whatever it was, the other stages have not been tried yet
            traceback.print_exc(file=sys.stdout)
            return False

    def _run(self, name: str, limit_s: float, figures: dict[str, float]) -> bool:
        others: dict[str, Callable[[float, dict[str, float]], bool]] = {
            "handoff": self._handoff,
            "tests": self._tests,
            "twins": self._twins,
        }
        if name in STAGES:
            return self._stage(name, limit_s, figures)
        return others[name](limit_s, figures)

    def _stage(self, name: str, limit_s: float, figures: dict[str, float]) -> bool:
        file = self.folder / f"{name}.jsonl"
        file.touch()
        ended = self._call(["-m", "bench.gpu.stages", name, str(file)], limit_s, _environment())
        for line in file.read_text().splitlines():
            figures |= json.loads(line)
        return ended

    def _handoff(self, limit_s: float, figures: dict[str, float]) -> bool:
        """The fastest way with arenas of 8 GiB, whose figures are the goal's, in two thirds of the time at most;
        then every way with arenas of 512 MiB, of which the host's share of one push is a large part.
        """
        on_gpu = torch.cuda.is_available()
        small, large = ("512", "8192") if on_gpu else ("16", "32")
        rounds = ("--rounds", "5" if on_gpu else "1")
        end_s = time.monotonic() + limit_s
        fastest = ("--ways", "kernel" if on_gpu else "cuda_ipc", "--pages", *_LARGE_PAGES)
        of_large = ("--region-mib", large, *rounds, *fastest)
        goal = self._push("handoff", of_large, limit_s * 2 / 3, figures)
        left_s = end_s - time.monotonic()
        of_small = ("--region-mib", small, *rounds)
        return self._push("handoff_512m", of_small, left_s, figures) and goal

    def _push(
        self, name: str, words: tuple[str, ...], limit_s: float, figures: dict[str, float]
    ) -> bool:
        """Runs `bench.handoff_gpu`; figures `NAME_over_copy_PAGE` are those of its fastest way."""
        file = self.folder / f"{name}.json"
        command = ["-m", "bench.handoff_gpu", *words, "--json", str(file)]
        ended = self._call(command, limit_s, self._driver())
        if not file.exists():
            return False
        found: dict[str, float] = json.loads(file.read_text())["figures"]
        figures |= {f"{name}_{of}": value for of, value in found.items()}
        for page in _PAGES:
            shares = [v for of, v in found.items() if of.endswith(f"_over_device_copy_{page}")]
            if shares:
                figures[f"{name}_over_copy_{page}"] = max(shares)
        return ended

    def _tests(self, limit_s: float, figures: dict[str, float]) -> bool:
        folders = ["kv_transfer", *(["baton_engine"] if torch.cuda.is_available() else [])]
        return self._pytest("tests", ["-m", "gpu", *marked_tests(*folders)], limit_s, figures)

    def _twins(self, limit_s: float, figures: dict[str, float]) -> bool:
        """In miniature only those of one kernel: all of them are among the tests that need no GPU."""
        tests = twin_tests() if torch.cuda.is_available() else twin_tests("page_sum")
        several = ["-n", str(min(8, os.cpu_count() or 1))] if find_spec("xdist") else []
        words = [*several, "-m", "not gpu and not slow", *tests]
        return self._pytest("twins", words, limit_s, figures)

    def _pytest(
        self, name: str, words: list[str], limit_s: float, figures: dict[str, float]
    ) -> bool:
        """Runs tests; figures `NAME_passed`, `_failed` and `_skipped`."""
        file = self.folder / f"{name}.xml"
        command = ["-m", "pytest", "-c", "bench/gpu/pytest.ini", "--rootdir", "."]
        ended = self._call([*command, f"--junitxml={file}", *words], limit_s, self._driver())
        if not file.exists():
            return False
        (suite,) = ElementTree.parse(file).getroot().iter("testsuite")
        run, failed, skipped = (
            int(suite.attrib[what]) for what in ("tests", "failures", "skipped")
        )
        failed += int(suite.attrib["errors"])
        figures |= {
            f"{name}_passed": run - failed - skipped,
            f"{name}_failed": failed,
            f"{name}_skipped": skipped,
        }
        return ended

    def _driver(self) -> dict[str, str]:
        """The environment of what calls the driver: without a GPU, one of host memory."""
        environment = _environment()
        if not torch.cuda.is_available() and (library := build_host_driver(self.folder)):
            environment["LD_LIBRARY_PATH"] = str(library.parent)
        return environment

    def _call(self, command: list[str], limit_s: float, environment: dict[str, str]) -> bool:
        """Runs Python; what it started ends with it. Whether it ended well, and is gone."""
        process = subprocess.Popen(
            [sys.executable, *command], cwd=_ROOT, env=environment, start_new_session=True
        )
        ended = gone = False
        try:
            ended = process.wait(limit_s) == 0
        except subprocess.TimeoutExpired:
            print(f"== ended after {limit_s:.0f} s", flush=True)
        finally:
            gone = _end(process)
        return ended and gone


def marked_tests(*folders: str) -> list[str]:
    """The files of these folders of `tests` that have tests which need a GPU; others may need packages that
    an image for GPUs lacks.
    """
    files = [file for folder in folders for file in (_ROOT / "tests" / folder).glob("test_*.py")]
    return [str(file) for file in sorted(files) if "mark.gpu" in file.read_text()]


def twin_tests(*names: str) -> list[str]:
    """The files that hold kernels against torch: those of all, or of the kernels named."""
    return [str(_ROOT / "tests/baton_engine" / f"test_{name}.py") for name in names or _TWINS]


def _environment() -> dict[str, str]:
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    return {**os.environ, **interpreted}


def _end(process: subprocess.Popen[bytes]) -> bool:
    """Ends the process and all of its group, where any is left; whether the process is gone.

    A killed process stays for as long as a call of the driver holds it.
    """
    try:
        os.killpg(process.pid, 9)
        process.wait(_GONE_S)
    except ProcessLookupError:
        return True
    except subprocess.TimeoutExpired:
        print(f"== not gone {_GONE_S:.0f} s after it was killed", flush=True)
        return False
    return True


if __name__ == "__main__":
    main()
