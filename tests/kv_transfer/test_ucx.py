"""The ucx backend between two real processes, over a Unix gate and over a TCP gate."""

import os
import queue
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from baton.errors import TransferError
from baton.ids import BlockId, XferId
from baton.pages import BegunPushes, PageWrite
from kv_transfer.backends.registry import BACKENDS
from kv_transfer.backends.ucx import sender
from kv_transfer.backends.ucx.frames import frames_of
from tests.kv_transfer.conformance import (
    LAYOUT,
    Link,
    Outcome,
    RevocableConformance,
    ShardedConformance,
    fill,
    push,
)
from tests.kv_transfer.remote import Remote, remote
from tests.waits import WAIT_S

BACKEND = BACKENDS["ucx"]

pytestmark = [
    pytest.mark.skipif(not BACKEND.installed, reason=f"not installed: {BACKEND.remedy}"),
]


def test_opening_ucx_leaves_no_settings_behind_for_others_in_the_process():
    asked = (
        "import os; before = dict(os.environ)\n"
        "from kv_transfer.backends.ucx.worker import UcxContext\n"
        "from kv_transfer.memory.listening import Listening\n"
        "UcxContext(Listening()); assert dict(os.environ) == before, set(os.environ) - set(before)"
    )
    subprocess.run([sys.executable, "-c", asked], check=True, timeout=60)


@contextmanager
def many_descriptors() -> Iterator[None]:
    """Those that are opened inside have numbers above 1,024."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    with ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        while held.enter_context(Path(os.devnull).open()).fileno() < 1100:
            pass
        yield


def test_pages_are_sent_by_a_worker_with_thousands_of_descriptors(tmp_path: Path):
    """It has many peers."""
    answers: queue.SimpleQueue[TransferError | None] = queue.SimpleQueue()
    write = PageWrite(
        xfer_id=XferId("x"), layer_index=0, source=(BlockId(0),), target=(BlockId(1),)
    )
    with remote(BACKEND.name, f"unix:{tmp_path / 'gate'}") as both, many_descriptors():
        link = both.link()
        writer = link.sender.connect(link.receiver.handle(), LAYOUT)
        writer.push(write, answers.put)
        assert answers.get(timeout=WAIT_S) is None
        writer.close()


class GivenUpMeanwhile(BegunPushes):
    """After three frames."""

    asked = 0

    def begin(self, push_id: int) -> bool:
        self.asked += 1
        if self.asked > 3:
            self.give_up()
        return super().begin(push_id)


def test_a_push_that_is_given_up_between_two_frames_sends_no_more_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    a_page_each = partial(frames_of, payload_bytes=LAYOUT.page_layer_bytes)
    monkeypatch.setattr(sender, "frames_of", a_page_each)
    with remote(BACKEND.name, f"unix:{tmp_path / 'gate'}") as both:
        link, outcome = both.link(), Outcome()
        fill(link.source)
        fill(link.target)
        before = bytes(link.target)
        writer = link.sender.connect(link.receiver.handle(), LAYOUT)
        writer.push(push(0, list(range(12)), list(range(12)), GivenUpMeanwhile()), outcome.done)
        (error,) = outcome.until_done()
        assert isinstance(error, TransferError)
        assert "given up" in error.message
        sent = 3 * LAYOUT.page_layer_bytes
        assert bytes(link.target[:sent]) == bytes(link.source[:sent])
        assert bytes(link.target)[sent:] == before[sent:]
        writer.push(push(0, [1], [1]), outcome.done)
        assert outcome.until_done()[1] is None
        writer.close()


class TestUcxOnOneHost(RevocableConformance, ShardedConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def both(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
        with remote(BACKEND.name, f"unix:{tmp_path_factory.mktemp('gate') / 'gate'}") as both:
            yield both

    @pytest.fixture
    def link(self, both: Remote) -> Link:
        return both.link()


class TestUcxOverTcp(RevocableConformance, ShardedConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def both(cls) -> Iterator[Remote]:
        with remote(BACKEND.name, "127.0.0.1:0") as both:
            yield both

    @pytest.fixture
    def link(self, both: Remote) -> Link:
        return both.link()
