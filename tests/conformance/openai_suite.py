"""The openai package's own test-suite, run against a cluster of ours. None of it is copied here: it takes a checkout.

    git clone https://github.com/openai/openai-python DIR
    python -m tests.conformance.openai_suite --checkout DIR --json bench/results/openai_suite.json

It serves a tiny model with random weights under every name that the suite asks for. What is counted, and why each case
that fails does, stands in docs/openai-conformance.md.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from bench.harness.report import Report
from tests.baton_engine.tiny_models import make_model
from tests.e2e.served import serve

FILES = {
    "chat": "tests/api_resources/chat/test_completions.py",
    "completions": "tests/api_resources/test_completions.py",
    "models": "tests/api_resources/test_models.py",
    "responses": "tests/api_resources/test_responses.py",
    "response_input_items": "tests/api_resources/responses/test_input_items.py",
}
NAMES = (
    "gpt-5.4",
    "gpt-5.1",
    "gpt-4o-mini",
    "gpt-4o",
    "gpt-3.5-turbo-instruct",
    "gpt-5.1-codex-max",
)
MIDDLE = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
_NOT_INSTALLED = "must have installed the package with the `aiohttp` extra"
_WHY = re.compile(r"'message': ['\"](.*?)['\"], '|^(\w+Error: .*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case of the suite.

    Attributes:
        name: Its function, without its parameters.
        transport: `aiohttp` for the cases of that extra, which not every environment has; else empty.
        why: What it failed with; empty if it passed, None if it was skipped.
    """

    name: str
    transport: str
    why: str | None


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of openai-python")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--url", help="a server that runs already; else one is started")
    options = parser.parse_args()
    report = Report(benchmark="openai_suite", settings={"suite": _version(options.checkout)})
    if options.url:
        _run_all(options.checkout, options.url, report)
    else:
        with tempfile.TemporaryDirectory() as directory:
            model = make_model(Path(directory), "qwen2", more_special=MIDDLE)
            # Chat without a limit goes on to the end of the context: keep that near.
            flags = (
                "--hybrid-workers",
                "1",
                "--max-model-len",
                "256",
                "--served-model-name",
                *NAMES,
            )
            with serve(str(model), *flags) as cluster:
                _run_all(options.checkout, cluster.url, report)
    if options.json:
        report.write(options.json)


def _run_all(checkout: Path, url: str, report: Report) -> None:
    for group, path in FILES.items():
        cases = run_file(checkout, path, url)
        _count(group, [case for case in cases if not case.transport], report)
        with_aiohttp = [case for case in cases if case.transport]
        if any(_NOT_INSTALLED in (case.why or "") for case in with_aiohttp):
            print(f"{group}: {len(with_aiohttp)} cases left out, aiohttp is not installed")
        else:
            _count(f"{group}_aiohttp", with_aiohttp, report)


def run_file(checkout: Path, path: str, url: str) -> list[Case]:
    """Runs one file of the suite against the server at `url`.

    Raises:
        RuntimeError: The suite itself does not run.
    """
    with tempfile.NamedTemporaryFile(suffix=".xml") as results:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
        command += ["--override-ini=filterwarnings=", f"--junitxml={results.name}", path]
        environment = os.environ | {
            "TEST_API_BASE_URL": f"{url}/v1",
            "PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{checkout}",
        }
        if not _has_xdist():
            command.remove("-n")
            command.remove("0")
            command.append("--override-ini=addopts=")
        done = subprocess.run(
            command,
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=1800,
        )
        if done.returncode not in (0, 1):
            raise RuntimeError(f"{path} does not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return [_case(found) for found in ElementTree.parse(results.name).iter("testcase")]


def _case(found: ElementTree.Element) -> Case:
    name, _, parameters = found.get("name", "").partition("[")
    failure = next(
        (found.find(kind) for kind in ("failure", "error") if found.find(kind) is not None), None
    )
    why: str | None = ""
    if failure is not None:
        text = failure.get("message", "")
        match = _WHY.search(text)
        why = (match[1] or match[2]) if match else text
    elif found.find("skipped") is not None:
        why = None
    return Case(name=name, transport="aiohttp" if "aiohttp" in parameters else "", why=why)


def _count(group: str, cases: list[Case], report: Report) -> None:
    passed = sum(case.why == "" for case in cases)
    report.figures[f"{group}_passed"] = passed
    report.figures[f"{group}_cases"] = len(cases)
    print(f"{group}: {passed} of {len(cases)}", flush=True)
    failed = Counter((case.name, (case.why or "")[:160]) for case in cases if case.why)
    for (name, why), times in sorted(failed.items()):
        print(f"  {times} x {name}: {' '.join(why.split())}")


def _has_xdist() -> bool:
    listed = subprocess.run(
        [sys.executable, "-c", "import xdist"], capture_output=True, check=False, timeout=60
    )
    return listed.returncode == 0


def _version(checkout: Path) -> str:
    text = (checkout / "src/openai/_version.py").read_text()
    return next(iter(re.findall(r'__version__ = "(.*?)"', text)), "unknown")


if __name__ == "__main__":
    main()
