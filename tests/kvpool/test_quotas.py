from collections.abc import Mapping

from baton.errors import BatonError, ConfigError
from kvpool.accounts import Allowance
from kvpool.quotas import QuotaKeeper

SMALL = {"anna": Allowance(max_bytes=1)}


class Said:
    """Gives what stands in `editions`, one after the other."""

    def __init__(self, *editions: Mapping[str, Allowance] | BatonError | None) -> None:
        self._editions = list(editions)

    async def next(self) -> Mapping[str, Allowance] | None:
        edition = self._editions.pop(0)
        if isinstance(edition, BatonError):
            raise edition
        return edition


async def test_what_is_wrong_changes_nothing_and_what_is_new_is_obeyed():
    obeyed: list[Mapping[str, Allowance]] = []
    keeper = QuotaKeeper(Said(SMALL, None, ConfigError("wrong"), {}), obeyed.append, pause_s=1.0)
    assert [await keeper.look() for _ in range(4)] == [True, False, False, True]
    assert obeyed == [SMALL, {}]
