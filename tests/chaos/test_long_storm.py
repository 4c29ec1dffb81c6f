"""A small part of the storm at scale (`long_storm.py`), with everything that it has."""

import tempfile
from pathlib import Path

import pytest

from tests.baton_engine.tiny_models import make_model
from tests.chaos.hosts import why_not
from tests.chaos.long_storm import ROLES, Account, Use, faults_of, grown, live_through

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


def test_a_process_has_grown_when_it_holds_over_a_tenth_more_than_any_of_its_kind_did() -> None:
    usual = Use(memory_mb=300.0, descriptors=65)
    account = Account(middle=dict.fromkeys(ROLES, usual), end=dict.fromkeys(ROLES, usual))
    account.middle["h0"] = Use(memory_mb=320.0, descriptors=74)
    account.end["p0"] = Use(memory_mb=345.0, descriptors=74)
    assert grown(account) == []
    account.end["d0"] = Use(memory_mb=353.0, descriptors=65)
    account.end["router"] = Use(memory_mb=300.0, descriptors=72)
    assert [line.split()[0] for line in grown(account)] == ["router", "d0"]
