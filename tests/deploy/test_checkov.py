"""checkov finds nothing but what ADR 0032 names. It has an environment of its own (`make k8s-tools`): it pins much that others need."""

import json
import re
import shutil
import subprocess

from tests.deploy.manifests import ROOT, Rendered, need

ADR = ROOT / "docs" / "adr" / "0032-what-checkov-may-find.md"
_ROW = re.compile(r"^\| `(CKV\w+)` \| `([\w./-]+)` \|", re.MULTILINE)


def test_checkov_finds_what_is_decided_and_nothing_else(cluster: Rendered, tmp_path):
    program = shutil.which("checkov", path=str(ROOT / ".venv-checkov" / "bin"))
    need(program or shutil.which("checkov"), "checkov")
    folder = tmp_path / "objects"
    folder.mkdir()
    for number, one in enumerate(cluster.objects):
        (folder / f"{number:03}.json").write_text(json.dumps(one))
    shown = subprocess.run(
        [
            program or "checkov",
            "--framework",
            "kubernetes",
            "--directory",
            str(folder),
            "--skip-download",
            "--output",
            "json",
            "--quiet",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    report = json.loads(shown.stdout)
    assert report["summary"]["passed"] > 400
    assert report["summary"]["parsing_errors"] == 0
    found = {(one["check_id"], one["resource"]) for one in report["results"]["failed_checks"]}
    named = set(_ROW.findall(ADR.read_text()))
    assert found <= named
    if cluster.overlay == "prod-ib":
        assert found == named, "the ADR names what is no longer found"
