from collections.abc import Iterator

import pytest

from baton_cluster.cli.main import main
from baton_cluster.launch.runtime_dir import RuntimeDir
from tests.baton_cluster.cli.fake_control import FakeControl, answering


@pytest.fixture
def cluster(home) -> Iterator[RuntimeDir]:
    with answering(FakeControl(), home / "run") as runtime:
        yield runtime


def test_a_planner_is_held(cluster, capsys):
    assert main(["planner", "hold", "--runtime-dir", str(cluster.path)]) == 0
    assert capsys.readouterr().out == "roles stay what they are\n"


def test_a_router_that_does_not_plan_says_so(cluster, capsys):
    assert main(["planner", "resume", "--runtime-dir", str(cluster.path)]) == 1
    assert "another router plans" in capsys.readouterr().err
