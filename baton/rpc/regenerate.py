"""Regenerates the gRPC stubs of `proto/` into `baton/rpc/v1/` (`make proto`), or checks that they are fresh."""

import argparse
import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUBS = Path("baton/rpc/v1")


def generate(out: Path) -> None:
    """Writes the stubs of all contracts below `out`.

    Raises:
        RuntimeError: protoc refused a contract; its own message is on stderr.
    """
    contracts = sorted((ROOT / "proto").rglob("*.proto"))
    plugins = Path(sys.executable).parent  # of this environment, whether or not it is on the PATH
    command = [
        *(sys.executable, "-m", "grpc_tools.protoc"),
        f"--plugin={plugins / 'protoc-gen-mypy'}",
        f"--plugin={plugins / 'protoc-gen-mypy_grpc'}",
        f"--proto_path={ROOT / 'proto'}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out=quiet:{out}",
        f"--mypy_grpc_out=quiet:{out}",
        *map(str, contracts),
    ]
    # In a process of its own: loaded here, the compiler's C++ runtime would break that of NIXL ("munmap_chunk():
    # invalid pointer").
    if subprocess.run(command, check=False).returncode != 0:  # noqa: S603  # our own words
        raise RuntimeError("protoc failed")


def stale(fresh: Path, committed: Path) -> list[str]:
    """Names the stub files that differ between two generated trees."""
    names = {p.name for tree in (fresh, committed) for p in tree.glob("*_pb2*")}
    _, differing, missing = filecmp.cmpfiles(fresh, committed, sorted(names), shallow=False)
    return sorted([*differing, *missing])


def main() -> int:
    """Entry point: exit status 1 names stale stubs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; change nothing")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as tree:
        generate(Path(tree))
        differing = stale(Path(tree) / STUBS, ROOT / STUBS)
    if differing:
        sys.stderr.write(f"stale stubs (run `make proto`): {', '.join(differing)}\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
