"""The ucx backend between two real processes, over a Unix gate and over a TCP gate."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from kv_transfer.backends.registry import BACKENDS
from tests.kv_transfer.conformance import (
    Link,
    RevocableConformance,
    ShardedConformance,
)
from tests.kv_transfer.remote import Remote, remote

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
