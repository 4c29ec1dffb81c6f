from kvpool.messages import Allowance, OwnerUsage
from kvpool.node.quotas import MAX_ASKERS, TenantRecords

USUAL = Allowance(max_bytes=100)


def by_tenant(book: TenantRecords, *owners: OwnerUsage) -> dict[str, OwnerUsage]:
    return {owner.tenant: owner for owner in book.complete(owners)}


def test_who_is_not_named_any_more_may_take_what_is_usual():
    book = TenantRecords(USUAL)
    large = Allowance(max_bytes=9, weight=2.0)
    book.allow({"anna": large, "bert": large})
    book.allow({"anna": large})
    assert book.allowance("anna") == large
    assert book.allowance("bert") == USUAL


def test_usage_shows_what_a_tenant_may_take_and_how_often_it_found_what_it_asked_for():
    book = TenantRecords(USUAL)
    book.allow({"anna": Allowance(max_bytes=7, weight=3.0)})
    book.asked("anna", hit_blocks=2, missed_blocks=1)
    book.asked("anna", hit_blocks=0, missed_blocks=4)
    owners = by_tenant(book, OwnerUsage(tenant="anna", blocks=2), OwnerUsage(tenant="bert"))
    anna, bert = owners["anna"], owners["bert"]
    assert (anna.blocks, anna.quota_bytes, anna.weight) == (2, 7, 3.0)
    assert (anna.hit_blocks, anna.missed_blocks) == (2, 5)
    assert (bert.quota_bytes, bert.weight, bert.hit_blocks) == (100, 1.0, 0)


def test_who_asked_and_has_nothing_is_shown_and_nobody_is_not():
    book = TenantRecords(USUAL)
    book.asked("anna", hit_blocks=0, missed_blocks=3)
    book.asked("", hit_blocks=5, missed_blocks=5)
    assert by_tenant(book).keys() == {"anna"}


def test_tenants_that_have_not_asked_for_longest_are_forgotten():
    book = TenantRecords(USUAL)
    for number in range(MAX_ASKERS):
        book.asked(f"t{number}", hit_blocks=1, missed_blocks=0)
    book.asked("t0", hit_blocks=1, missed_blocks=0)
    book.asked("new", hit_blocks=1, missed_blocks=0)
    shown = by_tenant(book)
    assert len(shown) == MAX_ASKERS
    assert "t0" in shown
    assert "t1" not in shown
