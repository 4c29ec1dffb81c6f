"""How fast KV moves from one process to another within one GPU: `python -m bench.handoff_gpu [--json FILE]`.

For each page size every way that works here pushes all pages of one arena, in random order, into an arena that another
process owns, in one push, alternating with one plain device copy of as many bytes in this process. Figures are medians
over the rounds: `cuda_ipc_16k_gb_s` and `cuda_ipc_over_device_copy_16k` (the driver's copies), `kernel_...` (the same
way with the Triton kernel, where there is one), `nixl_...` where NIXL is installed. The goal is 0.8 of the device copy.
"""

import argparse
import statistics
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from baton.errors import TransferError
from baton.ids import LayerName
from baton.layout import KvLayout
from baton.pages import PageWrite
from bench.harness.report import Report
from bench.transfer.copying import Way, push_of_all, pushing
from kv_transfer.backends.cuda_ipc import PageMovers
from kv_transfer.backends.registry import BACKENDS, open_receivers, open_senders
from kv_transfer.memory.arena import ArenaSpan
from kv_transfer.memory.cuda import Cuda, Rows, devices
from kv_transfer.memory.listening import Listening
from kv_transfer.memory.region_server import RegionAccess
from kv_transfer.ports import KvWriter, RegionHandle

SECRET = bytes(32)
_FILLED_BYTES = (64 << 20) + 8 * 1021
PAGE_BYTES = {"16k": 16 << 10, "64k": 64 << 10, "256k": 256 << 10, "1m": 1 << 20, "8m": 8 << 20}


def main() -> None:
    """Entry point."""
    arguments = _arguments()
    if not devices():
        raise SystemExit("no GPU: this benchmark copies from device memory to device memory")
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    report = Report(benchmark="handoff_gpu", settings=settings)
    for label in arguments.pages:
        _measure(label, PAGE_BYTES[label], arguments, report)
    for name, value in sorted(report.figures.items()):
        print(f"{name:44} {value:10.3f}")
    if arguments.json:
        report.write(arguments.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here")
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


def _measure(label: str, page_bytes: int, arguments: argparse.Namespace, report: Report) -> None:
    layout, cuda = _layout(page_bytes), Cuda(arguments.device)
    num_pages = (arguments.region_mib << 20) // page_bytes
    size = layout.region_bytes(num_pages)
    local = ArenaSpan(address=cuda.allocate(size), size_bytes=size, device=arguments.device)
    _fill(cuda, local, arguments.seed)
    beside = cuda.allocate(size)
    here, there = get_context("spawn").Pipe()
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        child = get_context("spawn").Process(
            target=_receive, args=(there, layout, num_pages, arguments.device, folder)
        )
        child.start()
        try:
            ways = _open(here, local, layout, num_pages, arguments.ways)
            push = push_of_all(num_pages, arguments.seed)
            figures = _rounds(cuda, local, beside, ways, push, arguments.rounds)
            _check(cuda, local, here, layout, push)
            for writer in ways.values():
                writer.close()
        finally:
            here.send("")
            child.join(30)
            cuda.free(local.address)
            cuda.free(beside)
    plain = figures.pop("device_copy")
    report.figures[f"device_copy_{label}_gb_s"] = size / plain / 1e9
    for name, seconds in figures.items():
        report.figures[f"{name}_{label}_gb_s"] = size / seconds / 1e9
        report.figures[f"{name}_over_device_copy_{label}"] = plain / seconds


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


def _open(
    here: Connection,
    local: ArenaSpan,
    layout: KvLayout,
    num_pages: int,
    wanted: list[str] | None,
) -> dict[str, KvWriter]:
    """An open way into the other process's arena for everything that works here."""
    names = [name for name, b in BACKENDS.items() if b.installed and b.device_memory]
    ways: dict[str, KvWriter] = {}
    found: dict[str, tuple[str, PageMovers | None]] = {name: (name, None) for name in names}
    kernel = _kernel(local)
    if kernel is not None:
        found["kernel"] = ("cuda_ipc", kernel)
    for label, (name, movers) in found.items():
        if wanted and label not in wanted:
            continue
        here.send(name)
        handle = RegionHandle(backend=name, opaque=here.recv(), num_blocks=num_pages)
        sender = open_senders(
            [name], local, num_blocks=num_pages, secret=SECRET, listening=Listening(), movers=movers
        )[name]
        try:
            ways[label] = sender.connect(handle, layout)
        except TransferError as error:
            print(f"{label}: {error.message}")
    return ways


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


def _rounds(
    cuda: Cuda,
    local: ArenaSpan,
    beside: int,
    ways: dict[str, KvWriter],
    push: PageWrite,
    rounds: int,
) -> dict[str, float]:
    """Median seconds of each way, and of the plain copy."""
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

    acts: dict[str, Way] = {"device_copy": plain}
    acts |= {name: pushing(writer, push) for name, writer in ways.items()}
    found: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for name, act in acts.items():
            seconds = act()
            if turn:  # the first one opens what is opened at first use
                found.setdefault(name, []).append(seconds)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def _check(
    cuda: Cuda, local: ArenaSpan, here: Connection, layout: KvLayout, push: PageWrite
) -> None:
    """What was measured was really moved: some random pages are there."""
    size = layout.page_layer_bytes
    for source, target in list(zip(push.source, push.target, strict=True))[:8]:
        here.send((target, size))
        there = here.recv()
        if there != cuda.read(local.address + source * size, size):
            raise SystemExit(f"page {target} is not what was pushed")


def _receive(asked: Connection, layout: KvLayout, num_pages: int, device: int, folder: str) -> None:
    """The other process: owns an arena, gives handles to it, and shows its pages."""
    cuda, size = Cuda(device), layout.region_bytes(num_pages)
    arena = ArenaSpan(address=cuda.allocate(size), size_bytes=size, device=device)
    names = [name for name, b in BACKENDS.items() if b.installed and b.device_memory]
    receivers = open_receivers(
        names,
        arena,
        server_address=lambda name: f"unix:{folder}/{name}.kv",
        layout=layout,
        num_blocks=num_pages,
        admission=RegionAccess(secret=SECRET),
    )
    while question := asked.recv():
        if isinstance(question, str):
            asked.send(receivers[question].handle().opaque)
        else:
            page, page_bytes = question
            asked.send(cuda.read(arena.address + page * page_bytes, page_bytes))
    for receiver in receivers.values():
        receiver.close()


if __name__ == "__main__":
    main()
