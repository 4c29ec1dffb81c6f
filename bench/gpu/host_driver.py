"""Compiles `host_cuda.c`: a CUDA driver whose GPU is host memory, against NVIDIA's own header,
which comes with Triton.
"""

import importlib.util
import shutil
import subprocess
from pathlib import Path


def build_host_driver(folder: Path) -> Path | None:
    """The driver's library `libcuda.so.1` in `folder`, for `LD_LIBRARY_PATH`;
    None without a C compiler or Triton. Blocks for a second.

    Raises:
        subprocess.CalledProcessError: It does not compile.
    """
    compiler, triton = shutil.which("cc"), importlib.util.find_spec("triton")
    if compiler is None or triton is None or triton.origin is None:
        return None
    headers = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    source, target = Path(__file__).with_name("host_cuda.c"), folder / "libcuda.so.1"
    flags = ["-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-pthread"]
    command = [compiler, *flags, "-isystem", str(headers), str(source), "-o", str(target)]
    subprocess.run(command, check=True, timeout=60)
    return target
