"""Moves KV pages from a prefill worker's arena to a decode worker's.

Where to begin: `ledger/transfer.py`, one hand-off as the decode worker sees it, with its states; `ledger/outbox.py`,
the same on the prefill worker. Both are pure; `messages.py` is what they say to each other,
`ticket.py` what has to be shown for it.

    ledger/     the pure cores: what each side has promised, when pages may be written and freed
    session/    carries their messages over gRPC: handshake, heartbeats, the connection to the peer's region
    memory/     where pages lie, how they are copied and hashed there, how peers get into that memory
    backends/   the ways in which pages move, behind `ports.py` (docs/guides/add-a-backend.md)

`plan.py` says which page goes to which, `heads.py` which bytes of a page, where ranks share the heads out differently;
`lease.py` for how long a peer may write.
"""
