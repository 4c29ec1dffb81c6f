"""What of the image can be shown without building it."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from types import ModuleType

import pytest

from tests.deploy.manifests import ROOT

DOCKER = ROOT / "deploy" / "docker"

_LOAD = """
import shutil
from triton.backends.nvidia.driver import CudaUtils
assert not any(map(shutil.which, ("cc", "gcc", "clang")))
assert CudaUtils().load_binary
"""


def lines() -> list[str]:
    return (DOCKER / "Dockerfile").read_text().splitlines()


def test_it_is_built_from_files_that_are_here():
    copied = [
        line.split()[1:-1] for line in lines() if line.startswith("COPY") and "--from" not in line
    ]
    assert all((ROOT / source).exists() for sources in copied for source in sources)
    kept_back = set((ROOT / ".dockerignore").read_text().split())
    named = {source.split("/")[0] for sources in copied for source in sources}
    assert not named & kept_back, "docker build would not find them"
    assert "deploy/*" not in kept_back or "!deploy/docker" in kept_back
    assert 'ENTRYPOINT ["/opt/baton/entrypoint.sh"]' in lines()
    assert "USER 10001:10001" in lines()
    assert os.access(DOCKER / "entrypoint.sh", os.X_OK)


def test_it_has_every_package_of_the_wheel():
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    wheel = {name for name in found["find"]["include"] if "." not in name}
    assert wheel == {line.split()[1] for line in lines() if line.startswith("COPY")} & wheel


def test_its_transports_are_built_for_the_cuda_of_pypis_torch():
    (named,) = re.findall(r'"\.\[(.+)\]"', (DOCKER / "Dockerfile").read_text())
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    wanted = [one for extra in named.split(",") for one in extras[extra]]
    assert {re.match(r"\w+-cu(\d+)", one)[1] for one in wanted if "-cu" in one} == {"13"}  # type: ignore[index]
    assert {"nixl-cu13", "ucx-cu13"} <= set(named.split(","))


def test_pins_leave_open_what_two_builds_of_torch_want_differently():
    """PyPI's needs CUDA's Python bindings of 13, the transports of CUDA 12 those of 12, and one file pins for both."""
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.M)
    assert "torch" in pinned
    assert not {"cuda-bindings", "cuda-python", "cuda-toolkit"} & set(pinned)


def test_only_the_stage_that_builds_has_a_compiler():
    text = (DOCKER / "Dockerfile").read_text()
    build, served = text.split("\nFROM ")[-2:]
    assert "g++" in build
    assert "apt-get" not in served


def script() -> ModuleType:
    """build_triton_driver.py, which lies in no package."""
    spec = importlib.util.spec_from_file_location("built", DOCKER / "build_triton_driver.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_container_uses_triton_without_a_compiler(tmp_path):
    prebuilt, own, driver = (tmp_path / name for name in ("prebuilt", "own", "driver"))
    driver.mkdir()
    command = [sys.executable, str(DOCKER / "build_triton_driver.py"), str(prebuilt)]
    subprocess.run(command, check=True, timeout=60)
    script().build_empty_driver(driver)
    # The programs of the image that its entrypoint uses, and no compiler.
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("mkdir", "cp"):
        (programs / name).symlink_to(shutil.which(name) or "")
    (programs / "baton").write_text(f"#!{sys.executable}\n{_LOAD}")
    (programs / "baton").chmod(0o755)
    entrypoint = tmp_path / "entrypoint.sh"
    entrypoint.write_text(
        (DOCKER / "entrypoint.sh").read_text().replace("/opt/baton/triton", str(prebuilt))
    )
    environment = {
        "PATH": str(programs),
        "HOME": str(tmp_path),
        "TRITON_CACHE_DIR": str(own),
        "LD_LIBRARY_PATH": str(driver),
    }
    for filled in (True, False):
        if not filled:
            shutil.rmtree(prebuilt)
            prebuilt.mkdir()
            shutil.rmtree(own)
        ran = subprocess.run(
            ["/bin/sh", str(entrypoint), "run"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (ran.returncode == 0) == filled, ran.stderr
        assert ("Failed to find C compiler" in ran.stderr) == (not filled)
