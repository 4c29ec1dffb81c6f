"""`baton doctor`: what this machine offers, and what would stop a cluster. Exit status 1 if something would."""

import argparse
import sys

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baton.config import env
from baton.config.load import load
from baton.config.setting import Setting
from baton_cluster.checks import Finding, Verdict, all_checks

_COLORS = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which port, and in what form."""
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--port", help="port that HTTP shall get", metavar="PORT")


def run(arguments: argparse.Namespace) -> int:
    """Looks at everything, shows it."""
    flags = []
    if arguments.port is not None:
        flags.append(
            Setting(path="router.port", value=arguments.port, source="--port", is_text=True)
        )
    router = load(environment=env.settings(), flags=flags).router
    findings = [check() for check in all_checks(router.host, router.port)]
    stopped = any(finding.verdict is Verdict.FAIL for finding in findings)
    if arguments.json:
        report = {"ok": not stopped, "findings": findings}
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        _show(findings, stopped=stopped)
    return 1 if stopped else 0


def _show(findings: list[Finding], *, stopped: bool) -> None:
    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        verdict = f"[{_COLORS[finding.verdict]}]{finding.verdict.value}[/]"
        advice = f"\n[dim]→ {escape(finding.advice)}[/]" if finding.advice else ""
        table.add_row(verdict, finding.name, escape(finding.found) + advice)
    console.print(table)
    if stopped:
        console.print("\n[red]A cluster would not start here as things are.[/]")
    else:
        console.print("\nA cluster can run here.")
