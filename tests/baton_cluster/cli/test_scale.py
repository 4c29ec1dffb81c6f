from collections.abc import Iterator

import pytest

from baton_cluster.cli.main import main
from baton_cluster.launch.runtime_dir import RuntimeDir
from tests.baton_cluster.cli.fake_control import FakeControl, answering


@pytest.fixture
def cluster(home) -> Iterator[RuntimeDir]:
    """One of one prefill and two decode workers, which may have eight."""
    with answering(FakeControl(), home / "run") as runtime:
        yield runtime


def scale(cluster: RuntimeDir, *words: str) -> int:
    return main(["scale", *words, "--runtime-dir", str(cluster.path)])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["prefill=3", "decode=1"],
            "3 prefill (was 1) + 1 decode (was 2): 2 to start, 1 to drain and end",
        ),
        (["decode=5"], "1 prefill + 5 decode (was 2): 3 to start"),
        (["decode=2"], "1 prefill + 2 decode: nothing changes"),
    ],
)
def test_it_says_in_one_line_what_changes(cluster, capsys, words, said):
    assert scale(cluster, *words) == 0
    assert capsys.readouterr().out == said + "\n"


def test_a_machine_reads_both_numbers(cluster, capsys):
    assert scale(cluster, "decode=3", "--json") == 0
    assert '"now": {"prefill": 1, "decode": 3, "hybrid": 0}' in capsys.readouterr().out


def test_what_the_launcher_refuses_is_one_line(cluster, capsys):
    assert scale(cluster, "decode=80") == 1
    assert capsys.readouterr().err == "baton: error: cluster.max_workers is 8\n"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ["decoder=3"],
            "decoder=3: there is no pool decoder; the pools are prefill, decode, hybrid",
        ),
        (["decode"], "decode: say how many workers of which pool, such as decode=5"),
        (["decode=many"], "decode=many: the number of decode workers must be a whole number"),
        (["decode=-1"], "decode=-1: the number of decode workers must be a whole number"),
        (["decode=1000001"], "workers must be a whole number from 0 to 1000000"),
        (["decode=" + "9" * 5000], "workers must be a whole number from 0 to 1000000"),
        (["decode=1", "decode=2"], "decode=2: decode is given twice"),
    ],
)
def test_what_is_no_number_of_a_pool_is_refused_before_anything_is_asked(
    cluster, capsys, words, why
):
    assert scale(cluster, *words) == 2
    assert why in capsys.readouterr().err
