"""What a node tells the others of its tenants, and what it makes of what they tell."""

from baton.ids import Incarnation, WorkerId, WorkerIdentity
from kvpool.messages import Allowance, NodeState, OwnerUsage, TenantPart
from kvpool.node.quotas import IDLE_S, MOST_TOLD, QuotaShares, TenantRecords

HERE, THERE = (
    WorkerIdentity(worker_id=WorkerId(name), incarnation=Incarnation(1)) for name in ("a", "b")
)
BLOCK_BYTES = 10


def shares(usual: Allowance | None = None, **allowances: Allowance) -> QuotaShares:
    book = TenantRecords(usual or Allowance())
    book.allow(allowances)
    return QuotaShares(HERE, book, BLOCK_BYTES)


def state(node: WorkerIdentity, *parts: TenantPart) -> NodeState:
    return NodeState(node=node, address="", parts=parts)


def anna(size_bytes: int) -> TenantPart:
    return TenantPart(tenant="anna", size_bytes=size_bytes, active=False)


def test_only_tenants_with_a_quota_are_told_of_and_who_is_idle_is_said_to_be() -> None:
    told = shares(anna=Allowance(max_bytes=100)).parts(
        [
            OwnerUsage(tenant="anna", blocks=3, active_s=0.0),
            OwnerUsage(tenant="bert", blocks=3, active_s=0.0),
        ],
        now_s=IDLE_S + 1,
    )
    assert told == (TenantPart(tenant="anna", size_bytes=30, active=False),)


def test_with_very_many_tenants_those_that_have_most_are_told_of() -> None:
    owners = [OwnerUsage(tenant=f"t{count}", blocks=count) for count in range(MOST_TOLD + 5)]
    told = shares(Allowance(max_bytes=100)).parts(owners, now_s=0.0)
    assert len(told) == MOST_TOLD
    assert min(part.size_bytes for part in told) == 5 * BLOCK_BYTES


def test_a_quota_is_what_other_nodes_leave_of_it() -> None:
    quotas = shares(anna=Allowance(max_bytes=100, weight=2.0), bert=Allowance(weight=3.0))
    first = quotas.due([], 0.0)
    assert first == {"anna": Allowance(max_bytes=100, weight=2.0), "bert": Allowance(weight=3.0)}
    quotas.learn([state(HERE, anna(90)), state(THERE, anna(60))])
    owners = [OwnerUsage(tenant="anna", blocks=2, active_s=0.0)]
    assert quotas.due(owners, 1.0) == {"anna": Allowance(max_bytes=62, weight=2.0)}
    assert quotas.due(owners, 2.0) == {}


def test_what_is_usual_holds_over_all_nodes_too() -> None:
    quotas = shares(Allowance(max_bytes=100))
    quotas.learn([state(THERE, anna(60))])
    assert quotas.due([], 0.0) == {"anna": Allowance(max_bytes=62)}
    quotas.learn([])
    assert quotas.due([], 1.0) == {"anna": None}
