"""Killed with signal 9 at any write, the disk gives back exactly what was written or nothing."""

import subprocess
import sys

import pytest


def lives(tmp_path, mode, seed, rounds):
    """Runs the loop; what it prints, by name. It exits with an error when a block is wrong, or lost, or back."""
    command = [sys.executable, "-m", "tests.kvpool.ssd.crash_loop"]
    done = subprocess.run(
        [*command, tmp_path / "lives", mode, str(seed), str(rounds)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


def test_killed_at_each_of_its_changes_a_disk_reads_right(tmp_path):
    seen = lives(tmp_path, "at_calls", 1, 1000)
    # The last life came to its end: there is no change left to be killed at.
    assert seen["kills"] == seen["lives"] - 1 > 60
    assert seen["right"] > seen["lives"]


def test_killed_at_random_moments_a_disk_reads_right(tmp_path):
    seen = lives(tmp_path, "at_random", 1, 30)
    assert seen["kills"] == seen["lives"] == 30


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_killed_at_each_of_the_changes_of_other_lives_a_disk_reads_right(tmp_path, seed):
    seen = lives(tmp_path, "at_calls", seed, 1000)
    assert seen["kills"] == seen["lives"] - 1 > 60


@pytest.mark.slow
def test_killed_over_and_over_a_disk_reads_right(tmp_path):
    seen = lives(tmp_path, "at_random", 2, 2000)
    assert seen["kills"] == seen["lives"] == 2000
    assert seen["right"] > 2000
