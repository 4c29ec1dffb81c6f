"""What is shown is kept for the audit as it comes."""

import tracemalloc
from collections.abc import AsyncGenerator

from baton.clock import ManualClock
from router.generation.generation_run import Delta
from router.generation.guardrails import MAX_KEPT_CHARS, checked_deltas
from router.guardrails.chain import GuardChain
from router.http.account import RequestAccount
from router.http.audit import audit_record
from router.limits.local import LocalLimiter
from router.limits.ports import GrantId
from router.tenants.tenant import ANONYMOUS, Caller


async def kept(*batches: list[Delta]) -> tuple[tuple[str, ...], list[int]]:
    """What is kept of each choice, and the most memory that was taken besides while each batch came."""

    async def coming() -> AsyncGenerator[list[Delta], None]:
        for batch in batches:
            yield batch

    account = RequestAccount(
        caller=Caller(tenant=ANONYMOUS),
        name="x",
        limiter=LocalLimiter(ManualClock()),
        grant=GrantId("x"),
        keeps_content=True,
    )
    deltas, most_bytes = checked_deltas(coming(), GuardChain(), account), list[int]()
    tracemalloc.start()
    try:
        async for _ in deltas:
            now_bytes, peak_bytes = tracemalloc.get_traced_memory()
            most_bytes.append(peak_bytes - now_bytes)
            tracemalloc.reset_peak()
    finally:
        tracemalloc.stop()
    content = audit_record(account, "x", "POST /x", 200, 0.0).content
    assert content is not None
    return content.answered, most_bytes


async def test_each_choice_is_kept_up_to_a_bound() -> None:
    batches = [[Delta(0, "a" * 400_000), Delta(1, "b")] for _ in range(4)]
    texts, _ = await kept(*batches)
    assert texts == ("a" * MAX_KEPT_CHARS, "bbbb")


async def test_what_is_kept_is_not_copied_for_each_token() -> None:
    _, most_bytes = await kept([Delta(0, "a" * 500_000)], *([Delta(0, "abcd ")] for _ in range(50)))
    assert len([most for most in most_bytes if most > 100_000]) < 5
