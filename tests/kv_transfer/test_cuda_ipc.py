"""The cuda_ipc backend: its own work with a fake driver, and on a GPU between two processes."""

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.errors import TransferError
from kv_transfer.backends.cuda_ipc import (
    CudaIpcReceiver,
    CudaIpcSender,
    DriverMover,
    PageMovers,
    PageRows,
)
from kv_transfer.memory.arena import ArenaSpan
from kv_transfer.memory.cuda import Stream, devices
from kv_transfer.ports import KvWriter
from tests.baton_engine.triton_cases import DEVICE, IS_INTERPRETED, kernels, needs_triton
from tests.kv_transfer.conformance import (
    LAYOUT,
    RECEIVER_BLOCKS,
    SENDER_BLOCKS,
    BackendConformance,
    Link,
    Outcome,
    RevocableConformance,
    SeveralPeersConformance,
    ShardedConformance,
    fill,
    page,
    push,
)
from tests.kv_transfer.fake_cuda import FakeCuda, FakeGpu
from tests.kv_transfer.remote import Remote, remote

PADDING = 512
NUMBERS = itertools.count()


@dataclass(frozen=True)
class Written:
    """A layer's event, of which streams know and nobody else may wait for here."""

    event: int

    def wait(self) -> None:
        raise AssertionError("a copy waits on its stream, not on the host")


class Mover:
    """The driver's, of the one stream that it was asked for."""

    def __init__(self, driver: FakeCuda) -> None:
        self._driver = driver
        self.closed = False

    def on(self, stream: Stream) -> "Mover":
        self._inner = DriverMover(self._driver, stream)
        return self

    def move(self, pages: Sequence[PageRows]) -> None:
        self._inner.move(pages)

    def close(self) -> None:
        self.closed = True


class Broken(Mover):
    """Fails the first time."""

    failed = False

    def move(self, pages: Sequence[PageRows]) -> None:
        if not self.failed:
            self.failed = True
            raise RuntimeError("CUDA out of memory")
        super().move(pages)


class Watched(Mover):
    """Counts what it is told to move together; stands still until `go` is set."""

    def __init__(self, driver: FakeCuda) -> None:
        super().__init__(driver)
        self.began = threading.Event()
        self.go = threading.Event()
        self.together: list[int] = []

    def move(self, pages: Sequence[PageRows]) -> None:
        self.began.set()
        assert self.go.wait(30)
        self.together.append(len(pages))
        super().move(pages)


class FakeLink(Link):
    """Both ends in this process."""

    gpu: FakeGpu
    driver: FakeCuda
    arena: ArenaSpan

    def connect(self, movers: PageMovers) -> KvWriter:
        sender = CudaIpcSender(self.arena, self.driver, num_blocks=SENDER_BLOCKS, movers=movers)
        return sender.connect(self.receiver.handle(), LAYOUT)


def allocated(gpu: FakeGpu, num_blocks: int) -> tuple[ArenaSpan, memoryview]:
    """An arena somewhere within an allocation, as torch's allocator gives it."""
    size = LAYOUT.region_bytes(num_blocks)
    whole = np.zeros(size + 2 * PADDING, dtype=np.uint8)
    begin = int(whole.ctypes.data)
    gpu.allocations[begin] = len(whole)
    inner = whole.data[PADDING : PADDING + size]
    return ArenaSpan(address=begin + PADDING, size_bytes=size, device=0), inner


class TestCudaIpcWithoutAGpu(BackendConformance, ShardedConformance, SeveralPeersConformance):
    @pytest.fixture
    def link(self, tmp_path: Path) -> Iterator[FakeLink]:
        gpu = FakeGpu()
        source_span, source = allocated(gpu, SENDER_BLOCKS)
        target_span, target = allocated(gpu, RECEIVER_BLOCKS)
        driver = FakeCuda(gpu)
        receiver = CudaIpcReceiver(
            target_span, FakeCuda(gpu), path=f"{tmp_path}/gate", num_blocks=RECEIVER_BLOCKS
        )
        link = FakeLink(
            sender=CudaIpcSender(source_span, driver, num_blocks=SENDER_BLOCKS),
            receiver=receiver,
            source=source,
            target=target,
        )
        link.gpu, link.driver, link.arena = gpu, driver, source_span
        yield link
        receiver.close()

    def test_a_peers_memory_is_let_go_before_it_is_known_to_have_left(self, link: FakeLink):
        handle = link.receiver.handle()
        writer = link.sender.connect(handle, LAYOUT)
        assert len(link.gpu.opened) == 1
        open_when_gone: list[int] = []
        gone = threading.Event()

        def left() -> None:
            open_when_gone.extend(link.gpu.opened)
            gone.set()

        link.receiver.revoke(handle, left)
        assert gone.wait(30)
        assert open_when_gone == []
        writer.close()

    def test_a_gpu_that_fails_is_told_as_a_failed_push(self, link: FakeLink, writer: KvWriter):
        link.driver.broken = True
        outcome = Outcome()
        writer.push(push(0, [0], [0]), outcome.done)
        (error,) = outcome.until_done()
        assert isinstance(error, TransferError)
        assert "launch failure" in error.message

    def test_a_memory_out_of_reach_is_told_before_anything_is_pushed(self, link: FakeLink):
        link.gpu.allocations.clear()
        with pytest.raises(TransferError, match="cuIpcOpenMemHandle"):
            link.sender.connect(link.receiver.handle(), LAYOUT)

    def test_a_peer_is_let_go_of_where_no_mover_can_be_had(self, link: FakeLink):
        class Refused(Mover):
            def on(self, stream: Stream) -> Mover:
                raise RuntimeError("CUDA error: invalid resource handle")

        handle, gone = link.receiver.handle(), threading.Event()
        sender = CudaIpcSender(
            link.arena, link.driver, num_blocks=SENDER_BLOCKS, movers=Refused(link.driver)
        )
        with pytest.raises(TransferError, match="invalid resource handle"):
            sender.connect(handle, LAYOUT)
        link.receiver.revoke(handle, gone.set)
        assert gone.wait(30)

    def test_a_mover_that_fails_is_told_and_the_next_push_is_served(self, link: FakeLink):
        """Torch and Triton have faults of their own; a writer's thread that ended would leave all later pushes
        unanswered.
        """
        writer = link.connect(Broken(link.driver))
        fill(link.source)
        outcome = Outcome()
        writer.push(push(0, [2], [1]), outcome.done)
        (error,) = outcome.until_done()
        assert isinstance(error, TransferError)
        assert "out of memory" in error.message
        writer.push(push(0, [2], [1]), outcome.done)
        assert outcome.until_done() == [error, None]
        assert page(link.target, RECEIVER_BLOCKS, 0, 1) == page(link.source, SENDER_BLOCKS, 0, 2)
        writer.close()

    def test_pushes_of_one_layer_go_together_and_no_layer_waits_for_a_later_one(
        self, link: FakeLink
    ):
        mover, outcome = Watched(link.driver), Outcome()
        writer = link.connect(mover)
        fill(link.source)
        writer.push(push(0, [0], [0]), outcome.done)
        assert mover.began.wait(30)
        for event in (1, 2):
            link.gpu.events[event] = threading.Event()
            link.gpu.events[event].set()
            for block in (1, 2, 3):
                computed = replace(push(event, [block], [block]), ready=Written(event=event))
                writer.push(computed, outcome.done)
        mover.go.set()
        assert outcome.until_done(7) == [None] * 7
        assert mover.together == [1, 3, 3]
        for block in (1, 2, 3):
            written = page(link.target, RECEIVER_BLOCKS, 2, block)
            assert written == page(link.source, SENDER_BLOCKS, 2, block)
        writer.close()
        assert mover.closed

    def test_pages_are_copied_once_the_gpu_has_written_them(self, link: FakeLink, writer: KvWriter):
        written = link.gpu.events[7] = threading.Event()
        outcome = Outcome()
        writer.push(replace(push(0, [2], [1]), ready=Written(event=7)), outcome.done)
        fill(link.source)
        written.set()
        assert outcome.until_done() == [None]
        assert page(link.target, RECEIVER_BLOCKS, 0, 1) == page(link.source, SENDER_BLOCKS, 0, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not devices(), reason="no GPU")
class TestCudaIpcOnAGpu(RevocableConformance, ShardedConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def both(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
        address = f"unix:{tmp_path_factory.mktemp('gate')}/gate"
        with remote("cuda_ipc", address, device=0) as both:
            yield both

    @pytest.fixture
    def link(self, both: Remote) -> Link:
        return both.link()


@pytest.mark.gpu
@pytest.mark.skipif(not devices(), reason="no GPU")
@pytest.mark.skipif(DEVICE == "cpu" and not IS_INTERPRETED, reason="torch reaches no GPU")
@needs_triton
class TestThePageKernelOnAGpu(BackendConformance, ShardedConformance, SeveralPeersConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def both(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
        address = f"unix:{tmp_path_factory.mktemp('gate')}/gate"
        movers = kernels("page_move").PageKernel(torch.device(DEVICE))
        with remote("cuda_ipc", address, device=0, movers=movers) as both:
            yield both

    @pytest.fixture
    def link(self, both: Remote) -> Link:
        return both.link()
