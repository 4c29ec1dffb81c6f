from collections.abc import Iterator

import pytest

from baton_cluster.cli.main import main
from baton_cluster.launch.runtime_dir import RuntimeDir
from tests.baton_cluster.cli.fake_control import FakeControl, answering


@pytest.fixture
def cluster(home) -> Iterator[RuntimeDir]:
    """One with the worker `hybrid-0`."""
    with answering(FakeControl(), home / "run") as runtime:
        yield runtime


def role(cluster: RuntimeDir, *words: str) -> int:
    return main(["role", *words, "--runtime-dir", str(cluster.path)])


def test_the_worker_is_asked_by_its_name_and_says_what_it_is_now(cluster, capsys):
    assert role(cluster, "hybrid-0", "decode") == 0
    assert capsys.readouterr().out == "hybrid-0 is a decode worker now\n"


def test_a_worker_that_does_not_finish_in_time_stays_what_it_was(cluster, capsys):
    assert role(cluster, "hybrid-0", "decode", "--timeout", "0.5") == 1
    assert "still a hybrid worker: 2 legs" in capsys.readouterr().err


def test_an_unknown_worker_is_one_line_with_those_that_are_there(cluster, capsys):
    assert role(cluster, "prefill-7", "decode") == 1
    error = capsys.readouterr().err
    assert "no worker prefill-7" in error
    assert "hybrid-0" in error


def test_the_last_worker_of_its_kind_gives_it_up_by_force_only(cluster, capsys):
    assert role(cluster, "hybrid-0", "prefill") == 1
    assert "none would be left that decodes" in capsys.readouterr().err
    assert role(cluster, "hybrid-0", "prefill", "--force") == 0


def test_a_role_that_is_none_is_refused_before_anything_is_asked(cluster, capsys):
    with pytest.raises(SystemExit):
        role(cluster, "hybrid-0", "router")
    assert "invalid choice" in capsys.readouterr().err
