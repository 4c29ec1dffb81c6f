"""Who gives up how much when a tier is full."""

from hypothesis import given
from hypothesis import strategies as st

from kvpool.eviction.fairness import Claim, share_out

CLAIMS = st.lists(
    st.builds(
        Claim,
        taken=st.integers(0, 30),
        weight=st.sampled_from([0.5, 1.0, 2.0, 3.0]),
        floor=st.integers(0, 20),
    ),
    max_size=6,
)


def one_by_one(claims: list[Claim], need: int) -> list[int]:
    """The plain way: whoever has most for its weight gives one, the first of equals."""
    gives = [0] * len(claims)
    for _ in range(need):
        able = [at for at, claim in enumerate(claims) if claim.taken - gives[at] > claim.floor]
        if not able:
            break
        most = max(able, key=lambda at: ((claims[at].taken - gives[at]) / claims[at].weight, -at))
        gives[most] += 1
    return gives


@given(CLAIMS, st.integers(0, 80))
def test_it_comes_to_the_same_as_giving_one_by_one(claims, need):
    gives, plain = share_out(claims, need), one_by_one(claims, need)
    assert sum(gives) == sum(plain)
    left = [(claim.taken - give) / claim.weight for claim, give in zip(claims, gives, strict=True)]
    plainly = [(claim.taken - g) / claim.weight for claim, g in zip(claims, plain, strict=True)]
    assert all(
        abs(mine - its) <= 1 / claim.weight
        for mine, its, claim in zip(left, plainly, claims, strict=True)
    )


@given(CLAIMS, st.integers(0, 80))
def test_nobody_goes_below_his_floor(claims, need):
    for claim, give in zip(claims, share_out(claims, need), strict=True):
        assert give == 0 or 0 < give <= claim.taken - claim.floor


def test_the_largest_gives_until_it_is_level_with_the_next():
    assert share_out([Claim(9, 1.0), Claim(4, 1.0), Claim(2, 1.0)], 5) == [5, 0, 0]
    assert share_out([Claim(9, 1.0), Claim(4, 1.0), Claim(2, 1.0)], 7) == [6, 1, 0]


def test_weight_counts():
    assert share_out([Claim(8, 2.0), Claim(5, 1.0)], 1) == [0, 1]
