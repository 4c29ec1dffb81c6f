"""The nixl backend between two real processes, over a Unix gate and over a TCP gate."""

from collections.abc import Iterator

import pytest

from kv_transfer.backends.registry import BACKENDS
from tests.kv_transfer.conformance import (
    Link,
    RevocableConformance,
    ShardedConformance,
)
from tests.kv_transfer.remote import Remote, remote

BACKEND = BACKENDS["nixl"]

pytestmark = [
    pytest.mark.skipif(not BACKEND.installed, reason=f"not installed: {BACKEND.remedy}"),
]


class TestNixlOnOneHost(RevocableConformance, ShardedConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def both(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
        with remote(BACKEND.name, f"unix:{tmp_path_factory.mktemp('gate') / 'gate'}") as both:
            yield both

    @pytest.fixture
    def link(self, both: Remote) -> Link:
        return both.link()


class TestNixlOverTcp(RevocableConformance, ShardedConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def both(cls) -> Iterator[Remote]:
        with remote(BACKEND.name, "127.0.0.1:0") as both:
            yield both

    @pytest.fixture
    def link(self, both: Remote) -> Link:
        return both.link()
