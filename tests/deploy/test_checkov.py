"""checkov finds nothing but what ADR 0032 names. It has an environment of its own (`make k8s-tools`):
it pins much that others need.
"""

import json
import re
import shutil
import subprocess

import pytest

from tests.deploy.manifests import OVERLAYS, ROOT, need, rendered

ADR = ROOT / "docs" / "adr" / "0032-what-checkov-may-find.md"
_ROW = re.compile(r"^\| `(CKV\w+)` \| `([\w./-]+)` \| ([\w, -]+) \|", re.MULTILINE)


def decided() -> set[tuple[str, str, str]]:
    """The ADR's rows, one for each overlay."""
    return {
        (overlay, check, resource)
        for check, resource, where in _ROW.findall(ADR.read_text())
        for overlay in (OVERLAYS if where == "every overlay" else where.split(", "))
    }


@pytest.mark.slow
def test_checkov_finds_what_is_decided_and_nothing_else(tmp_path):
    program = shutil.which("checkov", path=str(ROOT / ".venv-checkov" / "bin"))
    program = program or shutil.which("checkov")
    need(program, "checkov")
    assert program is not None
    for overlay in OVERLAYS:
        (tmp_path / overlay).mkdir()
        for number, one in enumerate(rendered(overlay).objects):
            (tmp_path / overlay / f"{number:03}.json").write_text(json.dumps(one))
    options = ["--framework", "kubernetes", "--skip-download", "--output", "json", "--quiet"]
    shown = subprocess.run(
        [program, *options, "--directory", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    report = json.loads(shown.stdout)
    assert report["summary"]["passed"] > 400 * len(OVERLAYS)
    assert report["summary"]["parsing_errors"] == 0
    found = {
        (one["file_path"].split("/")[1], one["check_id"], one["resource"])
        for one in report["results"]["failed_checks"]
    }
    assert found == decided()
