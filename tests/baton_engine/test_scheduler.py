import pytest

from baton.errors import EngineError, InvalidRequestError, InvariantError, PromptTooLongError
from baton.generation import FinishReason, TokenSample
from baton.ids import SeqId
from baton_engine.messages import (
    Abort,
    Failed,
    FlushCache,
    Generate,
    Prefill,
    PrefillStarted,
    Receive,
    Release,
    Released,
    Reserved,
    Start,
)
from baton_engine.scheduling.kv_cache_manager import KvCacheManager
from baton_engine.scheduling.scheduler import Scheduler
from tests.baton_engine.sampled import Sampled, by_sequence
from tests.baton_engine.scheduling_world import SECRET, World, hand_off, layout, limits, prompt

A, B, C = SeqId("a"), SeqId("b"), SeqId("c")


def generate(seq_id: SeqId, *args, **kwargs) -> Generate:
    return Generate(seq_id=seq_id, prompt=prompt(*args, **kwargs))


def prefill(seq_id: SeqId, *args, **kwargs) -> Prefill:
    return Prefill(seq_id=seq_id, prompt=prompt(*args, **kwargs))


def reserve(seq_id: SeqId, *args, **kwargs) -> Receive:
    return Receive(seq_id=seq_id, prompt=prompt(*args, **kwargs))


def start(seq_id: SeqId, *tokens: int | None) -> Start:
    """First tokens of samples 0, 1…; None for one that finished at once."""
    return Start(
        seq_id=seq_id,
        first_tokens=tuple(
            TokenSample(sample=i, token=0, finish=FinishReason.STOP)
            if token is None
            else TokenSample(sample=i, token=token)
            for i, token in enumerate(tokens)
        ),
    )


def row_of(world: World, seq_id: SeqId, step: int = -1):
    (row,) = [row for row in world.plans[step].rows if row.seq.seq_id == seq_id]
    return row


def test_a_prompt_is_answered_up_to_max_tokens():
    world = World(limits())
    world.tell(generate(A, 10, max_tokens=7))
    world.run()
    assert world.tokens(A) == world.undisturbed(prompt(10, max_tokens=7))
    assert len(world.tokens(A)) == 7
    assert world.finish(A) is FinishReason.LENGTH
    world.assert_empty()


def test_prefill_started_is_told_with_the_step_that_computes_the_first_chunk():
    world = World(limits())
    world.tell(generate(A, 10))
    started, sampled = world.step()
    assert started == PrefillStarted(seq_id=A, num_blocks=3, cached_tokens=0)
    assert isinstance(sampled, Sampled)


def test_the_model_length_ends_a_sample_before_max_tokens():
    world = World(limits(max_model_len=12))
    world.tell(generate(A, 10, max_tokens=100))
    world.run()
    assert len(world.tokens(A)) == 2
    assert world.finish(A) is FinishReason.LENGTH


def test_an_end_of_sequence_token_is_told_and_ends_the_sample():
    undisturbed = World(limits()).undisturbed(prompt(10))
    world = World(limits(), eos_ids=(undisturbed[2],))
    world.tell(generate(A, 10))
    world.run()
    assert world.tokens(A) == undisturbed[:3]
    assert world.finish(A) is FinishReason.STOP


def test_a_stop_token_ends_the_sample_but_an_ignored_end_of_sequence_does_not():
    undisturbed = World(limits()).undisturbed(prompt(10))
    world = World(limits(), eos_ids=(undisturbed[1],))
    world.tell(generate(A, 10, ignore_eos=True, stop_token_ids=(undisturbed[3],)))
    world.run()
    assert world.tokens(A) == undisturbed[:4]
    assert world.finish(A) is FinishReason.STOP


def test_a_resumed_prompt_goes_on_where_it_was_and_counts_what_it_had():
    asked = prompt(10, max_tokens=7)
    full = World(limits()).undisturbed(asked)
    world = World(limits())
    world.tell(generate(A, 10, max_tokens=7, output=tuple(full[:4])))
    world.step()
    assert row_of(world, A).seq.prompt_len == 10
    world.run()
    assert world.tokens(A) == full[4:]
    assert world.finish(A) is FinishReason.LENGTH


def test_samples_share_the_prompt_and_differ_from_the_first_token():
    world = World(limits())
    world.tell(generate(A, 10, samples=3))
    world.step()
    assert [len(plan.rows) for plan in world.plans] == [1]
    assert world.scheduler.load().blocks_used == 3
    world.step()
    assert len(world.plans[-1].copies) == 2  # the last to write needs no copy
    world.run()
    for sample in range(3):
        assert world.tokens(A, sample) == world.undisturbed(prompt(10), sample)
    world.assert_empty()


def test_samples_of_a_prompt_that_fills_its_pages_copy_nothing():
    world = World(limits())
    world.tell(generate(A, 8, samples=3))
    world.run()
    assert not any(plan.copies for plan in world.plans)
    assert world.tokens(A, 2) == world.undisturbed(prompt(8), 2)


def test_a_long_prompt_is_computed_in_chunks_beside_running_decodes():
    world = World(limits(max_num_batched_tokens=8))
    world.tell(generate(A, 4, max_tokens=20))
    world.step()
    long = tuple(range(50, 80))
    world.tell(generate(B, long))
    for _ in range(4):
        world.step()
        assert row_of(world, A).num_tokens == 1
        assert row_of(world, B).num_tokens == 7
    world.run()
    assert world.tokens(A) == world.undisturbed(prompt(4, max_tokens=20))
    assert world.tokens(B) == world.undisturbed(prompt(long))


def test_a_full_batch_of_decodes_leaves_a_prompt_that_was_let_in_some_budget():
    world = World(limits(max_num_seqs=64, max_num_batched_tokens=4))
    world.tell(*(generate(SeqId(f"s{i}"), 1, max_tokens=60) for i in range(3)))
    world.step()
    world.tell(generate(A, 6))
    world.step()
    assert row_of(world, A).num_tokens == 1


def test_no_more_samples_run_than_there_are_seats():
    world = World(limits(max_num_seqs=3))
    world.tell(generate(A, 5, samples=2), generate(B, 6, samples=2), generate(C, 7))
    world.step()
    assert [row.seq.seq_id for row in world.plans[-1].rows] == [A]
    assert world.scheduler.load().waiting == 2
    world.run()
    assert world.tokens(B, 1) == world.undisturbed(prompt(6), 1)


def test_pages_that_nobody_gave_back_are_told_as_leaked_once_nobody_is_here(monkeypatch):
    world = World(limits(), enable_prefix_caching=False)
    world.tell(generate(A, 20))
    world.step()
    held = world.scheduler.load()
    assert (held.blocks_used > 0, held.blocks_leaked) == (True, 0)
    with monkeypatch.context() as patch:
        patch.setattr(KvCacheManager, "free", lambda self, sequence: None)
        world.tell(Abort(seq_id=A))
    load = world.scheduler.load()
    assert load.blocks_leaked == load.blocks_used == held.blocks_used


def test_after_everybody_left_no_page_is_leaked():
    world = World(limits())
    world.tell(generate(A, 20), generate(B, 30))
    world.run()
    assert world.scheduler.load().blocks_leaked == 0


def test_a_later_prompt_computes_only_what_no_earlier_one_did():
    world = World(limits())
    world.tell(generate(A, 20))
    world.run()
    world.tell(generate(B, 30))
    world.step()
    assert world.cached_tokens(B) == 20
    world.run()
    assert world.tokens(B) == world.undisturbed(prompt(30))
    load = world.scheduler.load()
    assert (load.prefix_hit_tokens, load.prefix_query_tokens) == (20, 50)


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token():
    world = World(limits())
    world.tell(generate(A, 8))
    world.run()
    world.tell(generate(B, 8))
    world.step()
    assert world.cached_tokens(B) == 4
    world.run()
    assert world.tokens(B) == world.tokens(A)


def test_generated_text_is_found_by_the_next_turn_of_a_conversation():
    world = World(limits())
    world.tell(generate(A, 6, max_tokens=7))
    world.run()
    text = (*range(6), *world.tokens(A))
    world.tell(generate(B, (*text, 1, 2, 3)))
    world.step()
    assert world.cached_tokens(B) == 12


def test_a_prompt_still_running_shares_its_computed_pages():
    world = World(limits(max_num_batched_tokens=8))
    world.tell(generate(A, 20))
    world.step()
    world.tell(generate(B, 20))
    world.step()
    world.step()
    assert row_of(world, B).start == 16
    world.run()
    assert world.tokens(B) == world.tokens(A)


def test_prompts_computed_side_by_side_end_up_with_the_same_pages():
    world = World(limits())
    world.tell(generate(A, 10), generate(B, 10))
    world.step()
    assert world.scheduler.load().blocks_used == 4  # two shared full pages, two partial ones
    world.run()
    assert world.tokens(A) == world.tokens(B)


def test_scopes_do_not_see_each_others_prefixes():
    world = World(limits())
    world.tell(generate(A, 20, scope="mine"))
    world.run()
    world.tell(generate(B, 20, scope="yours"))
    world.step()
    assert world.cached_tokens(B) == 0


def test_without_prefix_caching_nothing_is_matched_or_kept():
    world = World(limits(), enable_prefix_caching=False)
    world.tell(generate(A, 20))
    world.run()
    world.tell(generate(B, 20))
    world.step()
    assert world.cached_tokens(B) == 0
    world.run()
    assert world.tokens(B) == world.undisturbed(prompt(20))
    assert world.scheduler.load().blocks_cached == 0


def test_a_flush_forgets_what_no_sequence_uses():
    world = World(limits())
    world.tell(generate(A, 20))
    world.run()
    assert world.scheduler.load().blocks_cached > 0
    world.tell(FlushCache())
    assert world.scheduler.load().blocks_cached == 0


def test_when_pages_run_out_the_last_arrived_gives_way_and_recomputes():
    world = World(limits(num_blocks=8, max_num_batched_tokens=16))
    world.tell(generate(A, 8, max_tokens=16), generate(B, tuple(range(50, 58)), max_tokens=16))
    world.run()
    assert world.scheduler.load().preemptions >= 1
    assert len(world.told(PrefillStarted, A)) == 1
    assert len(world.told(PrefillStarted, B)) >= 2
    assert world.tokens(A) == world.undisturbed(prompt(8, max_tokens=16))
    asked = prompt(tuple(range(50, 58)), max_tokens=16)
    assert world.tokens(B) == world.undisturbed(asked)
    world.assert_empty()


def test_a_preempted_sequence_comes_back_before_those_that_never_ran():
    world = World(limits(num_blocks=8))
    world.tell(generate(A, 8, max_tokens=16), generate(B, tuple(range(50, 58)), max_tokens=16))
    world.step()
    world.tell(generate(C, (1, 2)))
    world.run()
    started = [e.seq_id for e in world.events if isinstance(e, PrefillStarted)]
    assert world.scheduler.load().preemptions >= 1
    assert started[:2] == [A, B]
    assert started.index(C) > started.index(B, 2)


def test_pages_that_are_being_handed_over_are_not_taken_away():
    world = World(limits(num_blocks=6))
    world.tell(prefill(A, 8), generate(B, tuple(range(50, 58)), max_tokens=16))
    world.run()
    assert len(world.told(PrefillStarted, A)) == 1
    assert world.scheduler.load().blocks_used == 2  # the other one gave way and waits
    assert world.scheduler.load().waiting == 1
    assert world.tell(Release(seq_id=A)) == [Released(seq_id=A)]
    world.run()
    asked = prompt(tuple(range(50, 58)), max_tokens=16)
    assert world.tokens(B) == world.undisturbed(asked)


def test_a_prefill_is_not_preempted_between_its_chunks():
    world = World(limits(num_blocks=8, max_num_batched_tokens=2))
    world.tell(generate(A, 8, max_tokens=16), prefill(B, tuple(range(50, 66))))
    world.run()
    assert world.scheduler.load().preemptions == 1
    assert len(world.told(PrefillStarted, B)) == 1
    world.tell(Release(seq_id=B))
    world.run()
    assert world.tokens(A) == world.undisturbed(prompt(8, max_tokens=16))


def test_a_prefill_draws_one_token_per_sample_and_keeps_its_pages_until_released():
    world = World(limits())
    world.tell(prefill(A, 10, samples=2))
    world.run()
    (sampled,) = world.told(Sampled, A)
    assert [token.token for token in sampled.tokens] == [
        world.undisturbed(prompt(10), sample)[0] for sample in range(2)
    ]
    assert world.scheduler.load().blocks_used == 3
    assert world.tell(Release(seq_id=A)) == [Released(seq_id=A)]
    assert world.scheduler.load().blocks_cached == 2
    world.assert_empty()


def test_a_prefill_exports_each_page_once_and_the_partial_one_last():
    world = World(limits(max_num_batched_tokens=6))
    world.tell(prefill(A, 15))
    world.run()
    exports = world.exports(A)
    assert [(e.first_block, len(e.blocks)) for e in exports] == [
        (0, 1),
        (1, 2),
        (3, 1),
    ]


def test_a_prefill_exports_the_cached_pages_with_its_first_chunk():
    world = World(limits())
    world.tell(generate(A, 12))
    world.run()
    world.tell(prefill(B, 15))
    world.run()
    (export,) = world.exports(B)
    assert (export.first_block, len(export.blocks)) == (0, 4)
    assert world.cached_tokens(B) == 12


def test_exported_pages_stay_while_a_transfer_may_read_them_even_if_equal_text_was_first():
    world = World(limits())
    world.tell(generate(A, 8, max_tokens=30), prefill(B, 8))
    world.step()
    (export,) = world.exports(B)
    exported = [list(world.runner.pages[page]) for page in export.blocks]
    world.tell(*(generate(SeqId(f"s{i}"), tuple(range(i, i + 30))) for i in range(100, 120)))
    world.run()
    assert [world.runner.pages[page] for page in export.blocks] == exported
    world.tell(Release(seq_id=B))
    world.assert_empty()


def test_a_reservation_is_granted_whole_with_what_is_held_already():
    world = World(limits())
    world.tell(generate(A, 10))
    world.run()
    world.tell(reserve(B, 10))
    (reserved,) = world.step()
    assert isinstance(reserved, Reserved)
    assert len(reserved.blocks) == 3
    assert reserved.held_blocks == 2


def test_a_handed_over_prompt_goes_on_as_if_it_had_never_moved():
    source, target = World(limits()), World(limits())
    source.tell(prefill(A, 10, samples=3))
    target.tell(reserve(A, 10, samples=3))
    source.run()
    target.step()
    hand_off(source, target, A)
    target.run()
    for sample in range(3):
        assert target.tokens(A, sample) == target.undisturbed(prompt(10), sample)
    source.tell(Release(seq_id=A))
    source.assert_empty()
    target.assert_empty()


def test_a_started_sequence_runs_in_the_next_step():
    world = World(limits())
    world.tell(reserve(A, 8))
    world.step()
    world.tell(start(A, 7))
    assert world.scheduler.load().running == 1
    assert world.scheduler.load().blocks_used == 2


def test_samples_finished_by_their_first_token_are_not_run():
    source, target = World(limits()), World(limits())
    first = source.undisturbed(prompt(10, samples=2), 0)[0]
    source = World(limits(), eos_ids=(first,))
    target = World(limits(), eos_ids=(first,))
    source.tell(prefill(A, 10, samples=2))
    target.tell(reserve(A, 10, samples=2))
    source.run()
    target.step()
    hand_off(source, target, A)
    target.run()
    assert target.tokens(A, 0) == [first]
    assert len(target.tokens(A, 1)) == 5
    target.assert_empty()


def test_with_every_sample_finished_the_pages_are_back_at_once_and_stay_cached():
    world = World(limits())
    world.tell(reserve(A, 8))
    world.step()
    assert world.tell(start(A, None)) == []
    assert world.scheduler.load().blocks_cached == 2
    world.assert_empty()


def test_reservations_wait_in_line_and_nobody_overtakes_for_room():
    world = World(limits(num_blocks=8))
    world.tell(reserve(A, 20, max_tokens=2), reserve(B, 20, max_tokens=2), reserve(C, 4))
    assert [event.seq_id for event in world.step()] == [A]
    assert world.step() == []
    world.tell(Abort(seq_id=A))
    assert [event.seq_id for event in world.step()] == [B, C]


def test_a_waiting_prompt_is_not_starved_by_later_reservations():
    world = World(limits(num_blocks=8))
    world.tell(reserve(A, 20, max_tokens=2))
    world.step()
    world.tell(generate(B, 24), reserve(C, 8))
    assert world.step() == []
    world.tell(Abort(seq_id=A))
    world.step()
    assert world.told(PrefillStarted, B)


def test_a_reservation_does_not_wait_for_token_budget():
    world = World(limits(max_num_batched_tokens=8))
    world.tell(generate(A, 40), generate(B, 40), reserve(C, 8))
    world.step()
    assert world.told(Reserved, C)
    assert not world.told(PrefillStarted, B)


def test_a_preempted_started_sequence_recomputes_here():
    source, target = World(limits()), World(limits(num_blocks=8))
    other = prompt(tuple(range(50, 58)), max_tokens=16)
    source.tell(prefill(A, 8, max_tokens=16), Prefill(seq_id=B, prompt=other))
    target.tell(reserve(A, 8, max_tokens=16), Receive(seq_id=B, prompt=other))
    source.run()
    target.step()
    hand_off(source, target, A)
    hand_off(source, target, B)
    target.run()
    assert target.scheduler.load().preemptions >= 1
    assert target.tokens(A) == target.undisturbed(prompt(8, max_tokens=16))
    assert target.tokens(B) == target.undisturbed(other)


def test_an_abort_gives_back_every_page_and_is_answered():
    world = World(limits(max_num_batched_tokens=16))
    world.tell(generate(A, 8, samples=3, max_tokens=50), generate(B, 40), reserve(C, 8))
    world.step()
    world.step()
    for seq_id in (A, B, C):
        assert world.tell(Abort(seq_id=seq_id)) == [Released(seq_id=seq_id)]
    world.assert_empty()


def test_an_abort_of_a_sequence_that_is_gone_is_not_answered():
    world = World(limits())
    assert world.tell(Abort(seq_id=A), Release(seq_id=B), start(C, 1)) == []


def test_a_start_without_reservation_fails_that_sequence_only():
    world = World(limits())
    world.tell(generate(A, 8), generate(B, 9))
    (failed,) = world.tell(start(A, 7))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, InvariantError)
    world.run()
    assert world.tokens(B) == world.undisturbed(prompt(9))


@pytest.mark.parametrize(
    "first_tokens",
    [
        pytest.param((), id="none"),
        pytest.param((TokenSample(sample=1, token=5),), id="other sample"),
        pytest.param((TokenSample(sample=0, token=1000),), id="outside the vocabulary"),
    ],
)
def test_a_start_with_wrong_first_tokens_fails(first_tokens: tuple[TokenSample, ...]):
    world = World(limits())
    world.tell(reserve(A, 8))
    world.step()
    world.tell(Start(seq_id=A, first_tokens=first_tokens))
    assert isinstance(world.error_of(A), InvalidRequestError)
    world.assert_empty()


def test_a_sequence_submitted_twice_fails_once():
    world = World(limits())
    world.tell(generate(A, 8), generate(A, 8))
    assert isinstance(world.error_of(A), InvariantError)
    world.assert_empty()


@pytest.mark.parametrize(
    ("asked", "error", "param"),
    [
        pytest.param(prompt(()), InvalidRequestError, "prompt", id="empty"),
        pytest.param(prompt((1, 1000)), InvalidRequestError, "prompt", id="vocabulary"),
        pytest.param(prompt((1, -1)), InvalidRequestError, "prompt", id="negative"),
        pytest.param(prompt(3, samples=9), InvalidRequestError, "n", id="samples"),
        pytest.param(prompt(3, samples=0), InvalidRequestError, "n", id="no sample"),
        pytest.param(prompt(3, samples=2, output=(1,)), InvalidRequestError, "n", id="resumed"),
        pytest.param(prompt(3, output=(1,) * 5), InvalidRequestError, "max_tokens", id="done"),
        pytest.param(prompt(50), PromptTooLongError, "prompt", id="model length"),
        pytest.param(prompt(41), PromptTooLongError, "prompt", id="pages"),
        pytest.param(prompt(30, max_tokens=12), PromptTooLongError, "max_tokens", id="output"),
    ],
)
def test_what_can_never_be_served_is_refused_on_arrival(asked, error, param):
    world = World(limits(max_model_len=50, num_blocks=10))
    world.tell(Generate(seq_id=A, prompt=asked))
    assert type(world.error_of(A)) is error
    assert world.error_of(A).param == param
    world.assert_empty()


def test_what_just_fits_runs_to_its_end_alone():
    world = World(limits(max_model_len=50, num_blocks=10))
    world.tell(generate(A, 30, max_tokens=11))
    world.run()
    assert len(world.tokens(A)) == 11
    assert world.scheduler.load().preemptions == 0


def test_a_prefill_needs_room_for_its_prompt_only():
    world = World(limits(max_model_len=50, num_blocks=10))
    world.tell(prefill(A, 40))
    world.run()
    assert len(world.tokens(A)) == 1


def test_a_failed_row_ends_its_request_and_no_other():
    world = World(limits())
    world.tell(generate(A, 8), generate(B, 9))
    plan, _ = world.scheduler.schedule(0.0)
    assert plan is not None
    result = world.runner.execute(plan)
    (failed,) = world.scheduler.fail(plan.rows[0].seq, EngineError("broken"))
    sampled = world.scheduler.update_from_output(plan, result, 0.0)
    assert isinstance(failed, Failed)
    assert [event.seq_id for event in by_sequence(sampled)] == [B]
    world.scheduler.check_integrity()


def test_pages_of_a_failed_text_are_not_found_again():
    world = World(limits())
    world.tell(generate(A, 20, samples=2))
    world.step()
    world.step(failing_row=0)
    assert world.told(Failed, A)
    assert world.scheduler.load().blocks_cached == 0
    world.tell(generate(B, 20))
    world.step()
    assert world.cached_tokens(B) == 0
    world.run()
    assert world.tokens(B) == world.undisturbed(prompt(20))


def test_pages_that_a_failed_text_shared_stay_with_those_that_use_them():
    world = World(limits())
    world.tell(generate(A, 20), generate(B, 12))
    world.step()
    world.step(failing_row=0)
    assert world.told(Failed, A)
    world.run()
    assert world.tokens(B) == world.undisturbed(prompt(12))
    world.tell(generate(C, 20))
    world.step()
    assert world.cached_tokens(C) == 12
    world.run()
    world.assert_empty()


def test_a_command_while_a_step_is_in_flight_is_a_broken_invariant():
    world = World(limits())
    world.tell(generate(A, 8))
    world.scheduler.schedule(0.0)
    with pytest.raises(InvariantError, match="in flight"):
        world.scheduler.handle(Abort(seq_id=A), 0.0)


def test_pending_prefill_tokens_count_what_is_not_computed_yet():
    world = World(limits(max_num_batched_tokens=8))
    world.tell(generate(A, 20), generate(B, tuple(range(50, 60))))
    assert world.scheduler.load().prefill_tokens_pending == 30
    world.step()
    assert world.scheduler.load().prefill_tokens_pending == 22


def test_limits_and_layout_must_agree_on_the_page():
    with pytest.raises(ValueError, match="disagree"):
        Scheduler(limits(block_tokens=4), layout=layout(8), secret=SECRET)


def scores_of(world: World, seq_id: SeqId):
    told = [event.prompt_logprobs for event in world.told(Sampled, seq_id)]
    return [[score.logprob for score in scores] for scores in told if scores is not None]


def test_a_scored_prompt_tells_of_all_its_tokens_but_the_first_with_its_first_token():
    world = World(limits(max_num_batched_tokens=4))
    world.tell(generate(A, 10, samples=2, prompt_logprobs=0))
    world.run()
    assert scores_of(world, A) == [[-float(token) for token in range(1, 10)]]
    assert world.told(Sampled, A)[0].prompt_logprobs is not None


def test_a_scored_prompt_is_computed_past_the_prefix_cache_and_still_fills_it():
    world = World(limits())
    world.tell(generate(A, 10))
    world.run()
    world.tell(generate(B, 10, prompt_logprobs=0))
    world.run()
    assert world.cached_tokens(B) == 0
    assert len(scores_of(world, B)[0]) == 9
    assert world.tokens(B) == world.tokens(A)


def test_a_preempted_prompt_is_scored_once_and_in_full():
    world = World(limits(num_blocks=8, max_num_batched_tokens=16))
    later = tuple(range(50, 58))
    world.tell(generate(A, 8, max_tokens=16), generate(B, later, max_tokens=16, prompt_logprobs=0))
    world.run()
    assert len(world.told(PrefillStarted, B)) >= 2
    assert scores_of(world, B) == [[-float(token) for token in later[1:]]]
    world.assert_empty()


def test_a_prompt_of_one_token_has_nothing_to_score():
    world = World(limits())
    world.tell(generate(A, 1, prompt_logprobs=3))
    world.run()
    assert scores_of(world, A) == [[]]


def test_what_a_resumed_prompt_generated_before_is_not_scored():
    world = World(limits())
    world.tell(generate(A, 4, output=(7, 8), prompt_logprobs=0))
    world.run()
    assert scores_of(world, A) == [[-1.0, -2.0, -3.0]]


def test_the_prefilling_side_of_a_hand_off_scores_and_the_other_does_not():
    source, target = World(limits()), World(limits())
    source.tell(prefill(A, 10, prompt_logprobs=0))
    source.run()
    target.tell(reserve(A, 10, prompt_logprobs=0))
    target.step()
    hand_off(source, target, A)
    target.run()
    assert len(scores_of(source, A)[0]) == 9
    assert scores_of(target, A) == []
    assert target.tokens(A) == target.undisturbed(prompt(10))


def test_the_story_of_a_sequence_has_its_moves_and_not_its_steps():
    world = World(limits())
    world.tell(generate(A, 20))
    world.run()
    told = [entry.event for entry in world.scheduler.story(A) if entry.core == "engine"]
    assert told == [
        "sample 0: GENERATE -> WAITING, 20 tokens, 0 pages",
        "sample 0: WAITING -> PREFILLING, 20 tokens, 5 pages",
        "sample 0: PREFILLING -> RUNNING, 21 tokens, 5 pages",
        "sample 0: RUNNING -> ENDED, 25 tokens, 0 pages",
    ]
    assert world.scheduler.story(B) == ()


def test_the_story_of_a_sequence_tells_which_pages_it_had_and_where_they_went():
    world = World(limits())
    world.tell(generate(A, 20))
    world.run()
    world.tell(generate(B, 20))
    world.run()
    first = [entry.event for entry in world.scheduler.story(A) if entry.core == "cache"]
    assert [event.split(":")[0] for event in first] == [
        *("allocated", "published", "allocated", "published", "freed")
    ]
    second = [entry.event for entry in world.scheduler.story(B) if entry.core == "cache"]
    assert second[0].startswith("found: 4 pages (")
    times = [entry.at_s for entry in world.scheduler.story(B)]
    assert times == sorted(times)


def test_the_story_of_a_block_tells_who_published_and_found_it_and_when_it_was_evicted():
    world = World(limits())
    world.tell(generate(A, 20))
    world.run()
    changes = world.scheduler.take_block_changes()
    assert changes is not None
    key = changes.stored[0]
    world.tell(generate(B, 20))
    world.run()
    world.tell(FlushCache())
    told = [entry.event for entry in world.scheduler.story(key)]
    assert [event.split(":")[0] for event in told] == ["published", "found", "flushed"]
    assert A in told[0]
    assert B in told[1]


def test_a_preempted_sequence_is_told_that_its_pages_were_taken():
    world = World(limits(num_blocks=8))
    world.tell(generate(A, 12, max_tokens=16), generate(B, tuple(range(50, 62)), max_tokens=16))
    world.run()
    told = [entry.event for entry in (*world.scheduler.story(A), *world.scheduler.story(B))]
    assert any(event.startswith("taken by a preemption: ") for event in told)


def test_an_error_of_a_known_sequence_carries_its_story():
    world = World(limits())
    world.tell(generate(A, 20), generate(A, 20))
    assert "GENERATE -> WAITING" in world.error_of(A).story_text
