"""`baton tenants`, by its command line."""

import io

import pytest

from baton_cluster.cli.main import main
from router.tenants.keys import hash_key, is_hash, new_key


def test_a_new_key_comes_with_its_hash(capsys):
    assert main(["tenants", "new-key"]) == 0
    key, digest = (line.split()[1] for line in capsys.readouterr().out.splitlines())
    assert hash_key(key) == digest
    assert is_hash(digest)


def test_a_key_on_standard_input_is_hashed(capsys, monkeypatch):
    key = new_key()
    monkeypatch.setattr("sys.stdin", io.StringIO(key + "\n"))
    assert main(["tenants", "hash-key"]) == 0
    assert capsys.readouterr().out.strip() == hash_key(key)


def test_a_weak_key_is_not_hashed(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hunter2\n"))
    assert main(["tenants", "hash-key"]) == 2
    assert "at least 24 characters" in capsys.readouterr().err


def test_a_document_is_checked(capsys, tmp_path):
    document = tmp_path / "tenants.yaml"
    document.write_text("tenants: [{id: a}, {id: b}]")
    assert main(["tenants", "check", str(document)]) == 0
    assert "2 tenants" in capsys.readouterr().out
    document.write_text("tenants: [{id: a, weight: -1}]")
    assert main(["tenants", "check", str(document)]) == 2
    assert "tenants[0].weight: must be above 0" in capsys.readouterr().err


def test_publishing_needs_a_redis(capsys, tmp_path):
    document = tmp_path / "tenants.yaml"
    document.write_text("tenants: []")
    assert main(["tenants", "publish", str(document)]) == 2
    assert "tenants.redis_url" in capsys.readouterr().err


@pytest.mark.parametrize("action", [[], ["no-such"]])
def test_an_unknown_action_is_refused(action, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["tenants", *action])
    assert ended.value.code == 2
