"""`baton config`, by its command line."""

import json

import pytest
import yaml

from baton_cluster.cli.main import main

SECRET = "ab" * 32


@pytest.fixture
def cluster_yaml(tmp_path):
    def write(text):
        file = tmp_path / "cluster.yaml"
        file.write_text(text)
        return str(file)

    return write


def test_a_file_in_order_is_said_to_be(capsys, cluster_yaml):
    assert main(["config", "check", cluster_yaml("router: {port: 9000}")]) == 0
    assert "in order" in capsys.readouterr().out


def test_everything_that_is_wrong_is_said_at_once(capsys, cluster_yaml, monkeypatch):
    monkeypatch.setenv("BATON_ROUTER_HOSTT", "x")
    file = cluster_yaml(
        "router: {port: abc, prot: 1}\nfoo: 1\nengine: {block_size: 3}\ncluster: {secret: zz}\n"
    )
    assert main(["config", "check", file]) == 2
    told = capsys.readouterr().err
    for place in (
        "router.prot: no such setting; did you mean port?",
        "foo: no such section",
        "router.port: expected int",
        "engine.block_size: must be a power of two",
        "cluster.secret: must be 64 hexadecimal digits",
        "BATON_ROUTER_HOSTT: no such setting",
    ):
        assert place in told
    assert "zz" not in told


def test_settings_that_do_not_fit_together_are_said(capsys, cluster_yaml):
    assert main(["config", "check", cluster_yaml("cluster: {discovery: redis}")]) == 2
    assert "needs cluster.redis_url" in capsys.readouterr().err


def test_what_is_shown_has_defaults_and_environment_and_no_secret(
    capsys, cluster_yaml, monkeypatch
):
    monkeypatch.setenv("BATON_ROUTER_PORT", "9001")
    url = "redis://:password@redis:6379/0"
    file = cluster_yaml(f"cluster: {{secret: '{SECRET}'}}\npool: {{redis_url: '{url}'}}\n")
    assert main(["config", "show", "-f", file]) == 0
    text = capsys.readouterr().out
    shown = yaml.safe_load(text)
    assert shown["router"]["port"] == 9001
    assert shown["engine"]["max_num_seqs"] == 256
    assert shown["cluster"]["secret"] == shown["pool"]["redis_url"] == "(hidden)"
    assert SECRET not in text
    assert "password" not in text


def test_what_is_shown_as_json_is_json(capsys):
    assert main(["config", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cluster"]["discovery"] == "static"


def test_the_schema_is_printed(capsys):
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "cluster.yaml"
