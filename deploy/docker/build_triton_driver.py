"""Compiles the one module that Triton would compile when a GPU is first used, so that the image needs no compiler:
`build_triton_driver.py FOLDER`.

Triton's cache names it by a hash of its source and of the platform. FOLDER is that cache; entrypoint.sh has a
container's own begin with it. The kernels themselves are compiled by `ptxas`, which comes with Triton.
"""

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock


def build_empty_driver(folder: Path) -> None:
    """`libcuda.so.1` as the linker wants it, which only hosts with GPUs have:
    every function that Triton's module calls, doing nothing.

    An entirely empty one would not do: linkers that are told `--as-needed`, as Ubuntu's are,
    would leave its name out of the module.
    """
    triton = importlib.util.find_spec("triton")
    assert triton is not None
    assert triton.origin is not None
    source = Path(triton.origin).parent / "backends" / "nvidia" / "driver.c"
    names = sorted(set(re.findall(r"\bcu[A-Z]\w+(?=\()", source.read_text())))
    code = "\n".join(f"int {name}(void) {{ return 0; }}" for name in names)
    options = ["-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-xc", "-"]
    command = [os.environ.get("CC", "cc"), *options, "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, input=code, text=True, check=True, timeout=60)  # noqa: S603  # no input from outside


def main(cache: Path) -> int:
    """Fills `cache`; 1 if Triton did not leave the module there."""
    with tempfile.TemporaryDirectory() as folder:
        build_empty_driver(Path(folder))
        os.environ["TRITON_CACHE_DIR"] = str(cache)
        os.environ["TRITON_LIBCUDA_PATH"] = folder
        from triton.backends.nvidia.driver import CudaUtils
        from triton.runtime.build import platform_key

        # The hash depends on whether the program `file` is installed, by which Python tells what format programs have.
        for linkage in ("", "ELF"):
            with mock.patch("platform.architecture", return_value=("64bit", linkage)):
                platform_key.cache_clear()
                with contextlib.suppress(
                    ImportError
                ):  # compiled and kept, but not loaded: there is no driver
                    CudaUtils()
    return 0 if len(list(cache.glob("*/cuda_utils*.so"))) == 2 else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
