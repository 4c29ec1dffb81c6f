"""Where one hand-off stands on the decode worker, and where it may go from there.

    (router) EXPECTED ─┐                      commit       checksums right
                       ├─ RESERVED ─ WRITING ──────── VERIFYING ──────── COMMITTED   pages belong to the running sequence
    (peer)      ASKED ─┘     │          │ │               │ wrong
                    peer lost│   peer lost│ cancel        │
                             ▼          ▼ ▼               ▼
           later attempt ◀─ ORPHANED   ABORTING ──────── QUIESCED ── engine has them ── FREE
                             └ nobody came ┘  the writer stopped, or can write no more

Where ranks of a prefill worker share the heads out, each of them asks, writes and commits its part (`parts.py`): the first one
that asks makes the transfer RESERVED, the last one that commits makes it VERIFYING, and any that is lost makes it ORPHANED.
"""

from enum import Enum


class TransferState(Enum):
    """Where one transfer stands on the decode worker."""

    EXPECTED = "expected"
    ASKED = "asked"
    RESERVED = "reserved"
    WRITING = "writing"
    VERIFYING = "verifying"
    ORPHANED = "orphaned"
    ABORTING = "aborting"
    QUIESCED = "quiesced"
    COMMITTED = "committed"
    FREE = "free"


_S = TransferState
TRANSITIONS: dict[TransferState, frozenset[TransferState]] = {
    _S.EXPECTED: frozenset({_S.RESERVED, _S.ORPHANED, _S.FREE}),
    _S.ASKED: frozenset({_S.RESERVED, _S.FREE}),
    _S.RESERVED: frozenset({_S.WRITING, _S.ORPHANED, _S.QUIESCED, _S.FREE}),
    _S.WRITING: frozenset({_S.VERIFYING, _S.ORPHANED, _S.ABORTING, _S.QUIESCED}),
    _S.VERIFYING: frozenset({_S.COMMITTED, _S.QUIESCED}),
    _S.ORPHANED: frozenset({_S.RESERVED, _S.WRITING, _S.ABORTING, _S.QUIESCED, _S.FREE}),
    _S.ABORTING: frozenset({_S.QUIESCED}),
    _S.QUIESCED: frozenset({_S.FREE}),
    _S.COMMITTED: frozenset(),
    _S.FREE: frozenset(),
}
ANNOUNCED = frozenset({_S.EXPECTED, _S.RESERVED, _S.WRITING, _S.ORPHANED})
"""By the router, and prefill workers may still come or go."""
ENDS = frozenset({_S.COMMITTED, _S.FREE})
