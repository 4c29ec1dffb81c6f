import fcntl
import os
import threading
from pathlib import Path

import pytest

from tests.machine import Machine
from tests.waits import WAIT_S, eventually


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "queue", tmp_path / "running"]
    for folder in made:
        folder.mkdir()
    return made


class Running(threading.Thread):
    """A test of another process: it says when it runs, and runs until it is told to end."""

    def __init__(self, folders: list[Path], *, alone: bool) -> None:
        super().__init__(daemon=True)
        self._machine, self._alone = Machine(*folders), alone
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with self._machine.taken(alone=self._alone):
            self.begun.set()
            assert self.may_end.wait(WAIT_S)

    def end(self) -> None:
        self.may_end.set()
        self.join(WAIT_S)


def test_tests_share_the_machine(folders: list[Path]):
    several = [Running(folders, alone=False) for _ in range(3)]
    assert all(one.begun.wait(WAIT_S) for one in several)
    for one in several:
        one.end()


def _is_waited_for(queue: Path) -> bool:
    """Whether a process is next, and waits."""
    found = os.open(queue, os.O_RDONLY)
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(found)
    return False


def test_a_test_that_is_alone_runs_after_those_before_it_and_before_those_behind_it(
    folders: list[Path],
):
    before = Running(folders, alone=False)
    assert before.begun.wait(WAIT_S)
    alone = Running(folders, alone=True)
    eventually(lambda: _is_waited_for(folders[0]))
    behind = Running(folders, alone=False)
    assert not alone.begun.is_set()
    before.end()
    assert alone.begun.wait(WAIT_S)
    assert not behind.begun.is_set()
    alone.end()
    assert behind.begun.wait(WAIT_S)
    behind.end()
