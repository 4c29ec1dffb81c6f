"""Drafts by suffix: what followed a text's end where it stood before, in itself and in what its own scope was told."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.speculative import SuffixSpeculation
from baton_engine.scheduling.suffixes import (
    DraftLengths,
    SharedOutputs,
    SuffixDrafter,
    SuffixIndex,
    SuffixTree,
)

ALL = 1 << 20
KEPT = 16
"""Places of one gram."""

TOKENS = st.lists(st.integers(0, 2), max_size=12)


def tree_of(
    *texts: list[int], depth: int = 24, factor: float = 1.0, least: float = 0.1
) -> SuffixTree:
    tree = SuffixTree(DraftLengths(depth, factor), least)
    for text in texts:
        tree.read(tree.add(text), ALL)
    return tree


def walks(
    known: list[tuple[int, list[int], int]],
    context: list[int],
    most: int,
    *,
    depth: int,
    factor: float,
    least: float,
) -> list[tuple[list[int], float]]:
    """For each length of a match the drafts that a suffix tree of these places counts out, and their score.

    Args:
        known: Number of a text, the text, and a place in it, in the order in which they were read.
    """
    found: list[tuple[list[int], float]] = []
    for length in range(1, min(depth - 1, len(context)) + 1):
        size = 3 if length >= 3 else 1
        alike = [p for p in known if p[2] >= size and p[1][p[2] - size : p[2]] == context[-size:]]
        places = [
            (number, place, text)
            for number, text, place in alike[-KEPT:]
            if place >= length and text[place - length : place] == context[-length:]
        ]
        allowed = min(most, int(factor * length + 1e-6), depth - length)
        drafts: list[int] = []
        probability, score = 1.0, 0.0
        while len(drafts) < allowed:
            nexts = sorted(
                (number, place, text[place + len(drafts)])
                for number, place, text in places
                if text[place : place + len(drafts)] == drafts and place + len(drafts) < len(text)
            )
            if not nexts:
                break
            counts = Counter(token for _, _, token in nexts)
            token = next(t for _, _, t in reversed(nexts) if counts[t] == max(counts.values()))
            probability *= counts[token] / len(nexts)
            if probability < least:
                break
            drafts.append(token)
            score += probability
        found.append((drafts, score))
    return found


@settings(max_examples=400, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(0, 2), TOKENS, st.integers(0, 12)), max_size=8),
    context=TOKENS,
    most=st.integers(1, 8),
    depth=st.integers(2, 10),
    factor=st.sampled_from([0.0, 0.5, 1.0, 2.5]),
    least=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
)
def test_drafts_are_those_that_a_tree_of_all_substrings_counts_out(
    parts, context, most, depth, factor, least
):
    tree = SuffixTree(DraftLengths(depth, factor), least)
    texts = [tree.add([]) for _ in range(3)]
    known: list[tuple[int, list[int], int]] = []
    for which, tokens, at_most in parts:
        text = texts[which]
        text.tokens.extend(tokens)
        before = text.end
        assert tree.read(text, at_most) == text.end - before <= at_most
        known += [(which, text.tokens, place) for place in range(before, text.end)]
    found = tree.continuation(context, most)
    ways = walks(known, context, most, depth=depth, factor=factor, least=least)
    assert found.score == pytest.approx(max((score for _, score in ways), default=0.0))
    if found.score:
        assert pytest.approx(found.score) in [s for tokens, s in ways if tokens == found.tokens]
    else:
        assert found.tokens == []


@settings(max_examples=200, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=3, max_size=3),
    removed=st.integers(0, 2),
    context=TOKENS,
    forgotten=st.integers(0, 6),
)
def test_a_text_that_is_removed_was_never_there(texts, removed, context, forgotten):
    tree = SuffixTree(DraftLengths(8, 1.0), 0.0)
    added = [tree.add(text) for text in texts]
    for text in added:
        tree.read(text, ALL)
    tree.remove(added[removed])
    tree.forget(added[removed], forgotten)
    others = tree_of(*(t for i, t in enumerate(texts) if i != removed), depth=8, least=0.0)
    assert tree.continuation(context, 4) == others.continuation(context, 4)
    tree.forget(added[removed], ALL)
    assert tree.num_places == others.num_places


@pytest.mark.parametrize(
    ("texts", "context", "drafts"),
    [
        ([[1, 2, 3, 4, 5, 6]], [1, 2], [3, 4]),  # as many as match
        ([[1, 2, 3, 4, 5, 6]], [9, 2], [3]),
        ([[9, 1, 2, 3], [1, 2, 4], [7, 1, 2, 4]], [1, 2], [4]),  # which follows most often
        ([[1, 2, 3], [1, 2, 4]], [1, 2], [4]),  # the last one of those
        ([[1, 2, 3, 7, 7], [5, 2, 4], [6, 2, 4]], [1, 2], [3, 7]),  # where more of it stood
        ([[1, 2]], [1, 2], []),  # nothing followed
        ([[1, 2, 3]], [], []),
        ([], [1, 2], []),
    ],
)
def test_the_likeliest_tokens_follow_as_many_as_match(texts, context, drafts):
    assert tree_of(*texts).continuation(context, 5).tokens == drafts


def test_a_draft_that_is_less_likely_than_asked_is_left_out():
    texts = [[1, 2, 3, 4, token] for token in (5, 6, 7)]
    assert tree_of(*texts, least=0.3).continuation([1, 2, 3], 8).tokens == [4, 7]
    assert tree_of(*texts, least=0.4).continuation([1, 2, 3], 8).tokens == [4]


def test_match_and_drafts_come_to_no_more_than_the_depth_of_the_tree():
    text = list(range(40))
    for depth in (2, 6, 7, 24):
        found = tree_of(text, depth=depth, factor=4.0).continuation(text[:20], 32)
        assert len(found.tokens) == max(min(4 * n, depth - n) for n in range(depth))


def test_of_one_place_less_than_all_is_kept():
    tree = SuffixTree(DraftLengths(24, 1.0), 0.1)
    text = tree.add([7] * 1000)
    assert tree.read(text, ALL) == 999
    assert tree.num_places == 2 * KEPT
    assert tree.forget(text, ALL) == 999
    assert tree.num_places == 0


def index(drafter: SuffixDrafter, scope: str = "", prompt_len: int = 0) -> SuffixIndex:
    return drafter.index(scope, prompt_len)


def drafter(**changes: int) -> SuffixDrafter:
    return SuffixDrafter(SuffixSpeculation(**({"num_speculative_tokens": 8} | changes)))


def test_of_a_long_text_the_end_alone_is_known():
    text = [1, 2, 3, 4] + [token % 50 + 100 for token in range(9000)]
    one = index(drafter(max_cached_requests=0))
    num_kept: list[int] = []
    for end in (2000, 5000, 8000, 9004):
        one.read(text[:end], ALL)
        num_kept.append(one.num_kept)
    assert one.continuation([1, 2, 3], 4) == []
    assert one.continuation([100, 101, 102], 4) == [103, 104, 105]
    assert max(num_kept) <= 2 * KEPT * 54


def test_a_text_that_has_grown_beyond_the_window_unread_is_read_from_there():
    text = [1, 2, 3, 4] + [5, 6, 7] * 5000
    one = index(drafter(max_cached_requests=0))
    assert one.read(text[:4], ALL) == 3
    assert one.read(text, 100) == 100
    assert one.continuation([1, 2, 3], 4) == []
    assert one.continuation([5, 6, 7], 4) == [5, 6, 7]


def test_outputs_help_other_texts_of_their_scope_once_they_are_read():
    worker = drafter()
    first = index(worker, "a", prompt_len=2)
    first.end([8, 9, 1, 2, 3, 4, 5])
    later = index(worker, "a", prompt_len=2)
    assert later.continuation([7, 1, 2], 8) == []
    assert worker.read_ended(ALL) == 4
    assert later.continuation([7, 1, 2], 8) == [3, 4]
    assert later.continuation([8], 8) == [], "a prompt is no output"


def test_a_running_output_helps_others_of_its_scope():
    worker = drafter()
    running, other = index(worker, "a", prompt_len=1), index(worker, "a", prompt_len=1)
    text = [9, 1, 2, 3]
    running.read(text, ALL)
    assert other.continuation([1, 2], 8) == [3]
    text += [4, 5]
    running.read(text, ALL)
    assert other.continuation([1, 2], 8) == [3, 4]


def test_without_cached_requests_a_text_is_looked_up_in_itself_alone():
    worker = drafter(max_cached_requests=0)
    index(worker).end([1, 2, 3, 4])
    assert worker.read_ended(ALL) == 0
    alone = index(worker)
    assert alone.continuation([1, 2], 8) == []
    alone.read([1, 2, 3, 4, 1, 2], ALL)
    assert alone.continuation([1, 2, 3, 4, 1, 2], 8) == [3, 4]


def test_a_flush_forgets_outputs_and_what_those_that_run_say_later():
    worker = drafter()
    running = index(worker)
    running.read([1, 2, 3, 4], ALL)
    worker.flush()
    assert index(worker).continuation([1, 2], 8) == []
    running.read([1, 2, 3, 4, 5, 6], ALL)
    running.end([1, 2, 3, 4, 5, 6])
    assert worker.read_ended(ALL) == 0
    assert index(worker).continuation([4, 5], 8) == []


def outputs(max_requests: int = 100, max_tokens: int = ALL) -> SharedOutputs:
    return SharedOutputs(DraftLengths(12, 1.0), 0.1, max_requests, max_tokens)


SAID = st.lists(
    st.tuples(st.sampled_from(["", "a", "b", "1:a/salt"]), TOKENS, st.integers(0, 12)), max_size=12
)


@settings(max_examples=200, deadline=None)
@given(said=SAID, context=TOKENS)
def test_a_scope_finds_what_it_would_find_if_there_were_no_other(said, context):
    together = outputs()
    for scope, tokens, at_most in said:
        told(together, scope, tokens, at_most)
    for scope in ("", "a", "b", "1:a/salt", "unknown"):
        alone = outputs()
        for other, tokens, at_most in said:
            if other == scope:
                told(alone, scope, tokens, at_most)
        assert together.continuation(scope, context, 6) == alone.continuation(scope, context, 6)


def told(kept: SharedOutputs, scope: str, tokens: list[int], at_most: int = ALL) -> None:
    output = kept.begin(scope)
    kept.extend(output, tokens, 0)
    kept.read(output, at_most)


@settings(max_examples=200, deadline=None)
@given(
    said=SAID,
    max_requests=st.integers(1, 4),
    max_tokens=st.integers(24, 40),
    more=st.lists(st.tuples(st.integers(0, 11), TOKENS), max_size=12),
)
def test_outputs_keep_to_their_bounds_and_the_first_go_first(said, max_requests, max_tokens, more):
    kept = outputs(max_requests, max_tokens)
    all_outputs = []
    for scope, tokens, at_most in said:
        output = kept.begin(scope)
        all_outputs.append(output)
        kept.extend(output, tokens, 0)
        kept.read(output, at_most)
        kept.end(output)
        check_bounds(kept, max_requests, max_tokens)
    for which, tokens in more:
        if which < len(all_outputs):
            output = all_outputs[which]
            kept.extend(output, output.text.tokens + tokens, 0)
            check_bounds(kept, max_requests, max_tokens)
    kept.read_ended(ALL)
    are_kept = [output.is_kept for output in all_outputs]
    assert sum(are_kept) == kept.num_outputs
    assert all(later or not earlier for earlier, later in pairwise(are_kept))
    assert kept.num_scopes == len({id(o.tree) for o in all_outputs if o.is_kept})
    assert kept.num_tokens == sum(len(o.text.tokens) for o in all_outputs if o.is_kept)


def check_bounds(kept: SharedOutputs, max_requests: int, max_tokens: int) -> None:
    assert kept.num_outputs <= max_requests
    assert kept.num_tokens <= max_tokens


def test_what_is_evicted_is_not_found_from_then_on_and_forgotten_bit_by_bit():
    kept = outputs(max_requests=2)
    for number in range(100):
        first = 100 * number
        told(kept, "a", list(range(first, first + 50)))
        assert kept.num_outputs <= 2
        assert kept.num_places <= 2 * 50 * 3
        for age in range(3):
            then = first - 100 * age
            found = kept.continuation("a", [then + 7, then + 8], 4).tokens
            assert found == ([then + 9, then + 10] if age < 2 and then >= 0 else [])


def test_outputs_that_nobody_reads_for_long_keep_to_the_bounds_too():
    """As where all steps have prompts in them that are bound by time, and none is left for drafts."""
    kept = outputs(max_requests=2)
    for number in range(100):
        output = kept.begin("a")
        kept.extend(output, [number] * 50, 0)
        kept.end(output)
    assert len(kept._unread) + len(kept._leaving) <= 3
    assert kept.read_ended(1000) == 2 * 49


def test_a_scope_without_outputs_takes_no_room():
    kept = outputs(max_requests=2)
    for number in range(50):
        told(kept, f"tenant {number}", [1, 2, 3, 4])
    assert kept.num_scopes == 2
    kept.clear()
    assert (kept.num_scopes, kept.num_outputs, kept.num_tokens, kept.num_places) == (0, 0, 0, 0)


def test_of_a_very_long_output_the_first_tokens_are_kept():
    kept = outputs()
    output = kept.begin("")
    text = list(range(40_000))
    kept.extend(output, text, 10)
    assert kept.num_tokens == 1 << 15
    kept.extend(output, [*text, 1], 10)
    assert kept.num_tokens == 1 << 15
    assert output.text.tokens[0] == 10


def test_outputs_that_have_ended_are_read_a_part_at_a_time():
    kept = outputs()
    for scope in ("a", "b"):
        output = kept.begin(scope)
        kept.extend(output, [1, 2, 3, 4, 5, 6], 0)
        kept.end(output)
    assert kept.read_ended(3) == 3
    assert kept.continuation("a", [2, 3], 4).tokens == [4, 5]
    assert kept.continuation("a", [5], 4).tokens == []
    assert kept.continuation("b", [2, 3], 4).tokens == []
    assert [kept.read_ended(3) for _ in range(4)] == [3, 3, 1, 0]
    assert kept.continuation("b", [2, 3], 4).tokens == [4, 5]
