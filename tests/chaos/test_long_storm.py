"""A small part of the storm at scale (`long_storm.py`), with everything that it has."""

import tempfile
from pathlib import Path

import pytest

from tests.baton_engine.tiny_models import make_model
from tests.chaos.hosts import why_not
from tests.chaos.long_storm import faults_of, live_through

pytest.importorskip("ucxx", reason="pages between hosts need a transport: make transports")


@pytest.mark.alone
@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_every_role_on_a_host_of_its_own_lives_through_partitions_and_hostile_clients(
    tmp_path: Path,
) -> None:
    if reason := why_not():
        pytest.skip(reason)
    model = make_model(tmp_path / "llama", "llama")
    with tempfile.TemporaryDirectory(prefix="bs-") as folder:
        account = live_through(model, Path(folder), requests=300, seed=1, longest_s=6.0)
    assert account.faults["swallow"] > 0
    assert account.attacks.total() > 0
    assert faults_of(account) == [], account.lines()
