"""How fast KV moves from one process to another within one GPU: `python -m bench.handoff_gpu [--json FILE]`.

For each page size every way that works here pushes all pages of one arena, in random order, into an arena that another
process owns, in one push, alternating with one plain device copy of as many bytes in this process. Figures are medians
over the rounds: `cuda_ipc_16k_gb_s` and `cuda_ipc_over_device_copy_16k` (the driver's copies), `kernel_...` (the same
way with the Triton kernel, where there is one), `nixl_...` where NIXL is installed. The goal is 0.8 of the device copy.

The report is written after every page size. A way that breaks off at first use is left out, one that does so later
costs the figures of its page size; both are counted in `failed`.
"""

import argparse
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from baton.errors import TransferError
from baton.ids import LayerName
from baton.layout import KvLayout
from baton.pages import PageWrite
from bench.gpu.figures import Figures, written_to
from bench.harness.report import Report
from bench.transfer.copying import Way, push_of_all, pushing
from kv_transfer.backends.cuda_ipc import PageMovers
from kv_transfer.backends.registry import BACKENDS, open_receivers, open_senders
from kv_transfer.memory.arena import ArenaSpan
from kv_transfer.memory.cuda import Cuda, Rows, devices
from kv_transfer.memory.listening import Listening
from kv_transfer.memory.region_server import RegionAccess
from kv_transfer.ports import KvReceiver, KvWriter, RegionHandle

SECRET = bytes(32)
_ANSWER_S = 30.0
_FILLED_BYTES = (64 << 20) + 8 * 1021
PAGE_BYTES = {"16k": 16 << 10, "64k": 64 << 10, "256k": 256 << 10, "1m": 1 << 20, "8m": 8 << 20}


class WrongPageError(Exception):
    """What was pushed has not arrived."""


def main() -> None:
    """Entry point: exit status 1 where something broke off."""
    arguments = _arguments()
    if not devices():
        raise SystemExit("no GPU: this benchmark copies from device memory to device memory")
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    report = Report(benchmark="handoff_gpu", settings=settings)
    figures = Figures(written_to(report, arguments.json))
    figures.add(failed=0.0)
    for label in arguments.pages:
        with figures.point(label):
            _measure(label, PAGE_BYTES[label], arguments, figures)
    for name, value in sorted(report.figures.items()):
        print(f"{name:44} {value:10.3f}")
    sys.exit(1 if figures.failed else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here, after every page size")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--region-mib", type=int, default=2048)
    parser.add_argument("--pages", nargs="+", choices=PAGE_BYTES, default=list(PAGE_BYTES))
    parser.add_argument("--ways", nargs="+", help="only these: kernel, cuda_ipc, nixl")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _layout(page_bytes: int) -> KvLayout:
    """One layer whose page has that many bytes: float16 keys and values of 16 tokens and heads of 64."""
    return KvLayout(
        model_fingerprint="bench",
        dtype="float16",
        block_tokens=16,
        num_kv_heads=page_bytes // (2 * 16 * 64 * 2),
        head_dim=64,
        layers=(LayerName("layers.0"),),
    )


def _measure(label: str, page_bytes: int, arguments: argparse.Namespace, figures: Figures) -> None:
    layout, cuda = _layout(page_bytes), Cuda(arguments.device)
    num_pages = (arguments.region_mib << 20) // page_bytes
    size = layout.region_bytes(num_pages)
    with ExitStack() as stack:
        local = ArenaSpan(address=cuda.allocate(size), size_bytes=size, device=arguments.device)
        stack.callback(cuda.free, local.address)
        _fill(cuda, local, arguments.seed)
        beside = cuda.allocate(size)
        stack.callback(cuda.free, beside)
        here = stack.enter_context(_receiver(layout, num_pages, arguments.device))
        push = push_of_all(num_pages, arguments.seed)
        plain_copy = _plain_copy(cuda, local, beside)
        plain_copy()
        acts: dict[str, Way] = {"device_copy": plain_copy}
        for name, (backend, movers) in _ways(local, arguments.ways).items():
            here.send(backend)
            handle = RegionHandle(backend=backend, opaque=_answer(here), num_blocks=num_pages)
            with figures.point(f"{name}, {label}"):
                writer = _open(backend, movers, handle, local, layout)
                if writer is not None:
                    stack.callback(writer.close)
                    push_all = pushing(writer, push)
                    push_all()  # opens what is opened at first use
                    acts[name] = push_all
        seconds = _rounds(acts, arguments.rounds)
        if len(acts) > 1:
            _check(cuda, local, here, layout, push)
    plain = seconds.pop("device_copy")
    found = {f"device_copy_{label}_gb_s": size / plain / 1e9}
    for name, taken_s in seconds.items():
        found[f"{name}_{label}_gb_s"] = size / taken_s / 1e9
        found[f"{name}_over_device_copy_{label}"] = plain / taken_s
    figures.add(**found)


@contextmanager
def _receiver(layout: KvLayout, num_pages: int, device: int) -> Iterator[Connection]:
    """The connection to a process that runs `_receive`; it has ended afterwards."""
    here, there = get_context("spawn").Pipe()
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        child = get_context("spawn").Process(
            target=_receive, args=(there, layout, num_pages, device, folder)
        )
        child.start()
        there.close()  # so that `here` ends with the process
        try:
            yield here
        finally:
            with suppress(OSError):  # it has ended by itself
                here.send("")
            here.close()
            child.join(_ANSWER_S)
            if child.is_alive():
                child.kill()
                child.join(_ANSWER_S)


def _answer(here: Connection) -> bytes:
    """The other process's.

    Raises:
        TimeoutError: It says nothing.
        EOFError: It has ended.
    """
    if not here.poll(_ANSWER_S):
        raise TimeoutError(f"the receiving process did not answer in {_ANSWER_S:.0f} s")
    answer: bytes = here.recv()
    return answer


def _fill(cuda: Cuda, local: ArenaSpan, seed: int) -> None:
    """Random bytes, again and again: their number is no multiple of a page's, so that no two pages are alike."""
    once = min(_FILLED_BYTES, local.size_bytes)
    cuda.write(local.address, np.random.default_rng(seed).bytes(once))
    stream = cuda.stream()
    for begin in range(once, local.size_bytes, once):
        rows = Rows(
            source=local.address,
            source_pitch=once,
            target=local.address + begin,
            target_pitch=once,
            length=min(once, local.size_bytes - begin),
            count=1,
        )
        cuda.copy_rows(rows, stream)
    cuda.wait(stream)
    cuda.end(stream)


def _ways(local: ArenaSpan, wanted: list[str] | None) -> dict[str, tuple[str, PageMovers | None]]:
    """Everything that is installed here: which backend, and what copies pages for it."""
    found: dict[str, tuple[str, PageMovers | None]] = {name: (name, None) for name in _backends()}
    kernel = _kernel(local)
    if kernel is not None:
        found["kernel"] = ("cuda_ipc", kernel)
    return {way: of for way, of in found.items() if not wanted or way in wanted}


def _backends() -> list[str]:
    return [name for name, b in BACKENDS.items() if b.installed and b.device_memory]


def _open(
    backend: str,
    movers: PageMovers | None,
    handle: RegionHandle,
    local: ArenaSpan,
    layout: KvLayout,
) -> KvWriter | None:
    """An open way into the other process's arena; None where it does not work here, which is said."""
    sender = open_senders(
        [backend],
        local,
        num_blocks=handle.num_blocks,
        secret=SECRET,
        listening=Listening(),
        movers=movers,
    )[backend]
    try:
        return sender.connect(handle, layout)
    except TransferError as error:
        print(f"{backend}: {error.message}")
        return None


def _kernel(local: ArenaSpan) -> PageMovers | None:
    try:
        import torch

        from baton_engine.kernels.triton.page_move import PageKernel
    except ImportError as error:
        print(f"kernel: {error}")
        return None
    if not torch.cuda.is_available():
        print(f"kernel: torch {torch.__version__} does not reach the GPU")
        return None
    return PageKernel(torch.device("cuda", local.device or 0))


def _plain_copy(cuda: Cuda, local: ArenaSpan, beside: int) -> Way:
    """The device's own copy of the whole arena."""
    stream, size = cuda.stream(), local.size_bytes
    rows = Rows(
        source=local.address,
        source_pitch=size,
        target=beside,
        target_pitch=size,
        length=size,
        count=1,
    )

    def plain() -> float:
        begin_s = time.perf_counter()
        cuda.copy_rows(rows, stream)
        cuda.wait(stream)
        return time.perf_counter() - begin_s

    return plain


def _rounds(acts: dict[str, Way], rounds: int) -> dict[str, float]:
    """Median seconds of each way, taking turns."""
    turns = [{name: act() for name, act in acts.items()} for _ in range(rounds)]
    return {name: statistics.median(turn[name] for turn in turns) for name in acts}


def _check(
    cuda: Cuda, local: ArenaSpan, here: Connection, layout: KvLayout, push: PageWrite
) -> None:
    """What was measured was really moved: some random pages are there."""
    size = layout.page_layer_bytes
    for source, target in list(zip(push.source, push.target, strict=True))[:8]:
        here.send((target, size))
        if _answer(here) != cuda.read(local.address + source * size, size):
            raise WrongPageError(f"page {target} is not what was pushed")


def _receive(asked: Connection, layout: KvLayout, num_pages: int, device: int, folder: str) -> None:
    """The other process: owns an arena, gives handles to it, and shows its pages."""
    cuda, size = Cuda(device), layout.region_bytes(num_pages)
    arena = ArenaSpan(address=cuda.allocate(size), size_bytes=size, device=device)
    receivers: dict[str, KvReceiver] = {}
    while question := asked.recv():
        if isinstance(question, str):
            try:
                if question not in receivers:
                    receivers |= open_receivers(
                        [question],
                        arena,
                        server_address=lambda name: f"unix:{folder}/{name}.kv",
                        layout=layout,
                        num_blocks=num_pages,
                        admission=RegionAccess(secret=SECRET),
                    )
                asked.send(receivers[question].handle().opaque)
            except Exception:  # noqa: BLE001 - the other ways may work
                traceback.print_exc(file=sys.stdout)
                asked.send(b"")  # no handle: its way does not open
        else:
            page, page_bytes = question
            asked.send(cuda.read(arena.address + page * page_bytes, page_bytes))
    for receiver in receivers.values():
        receiver.close()


if __name__ == "__main__":
    main()
