from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.errors import InvalidRequestError, PromptTooLongError
from baton.generation import BeamSearchParams, EarlyStopping, FinishReason, Prompt, SamplingParams
from baton.ids import SeqId
from baton_engine.messages import (
    Abort,
    Generate,
    Prefill,
    PrefillStarted,
    PromptComputed,
    Receive,
    Release,
    Released,
    Start,
)
from tests.baton_engine.sampled import Sampled
from tests.baton_engine.scheduling_world import World, hand_off, limits, prompt
from tests.baton_engine.tiny_models import make_model, random_prompts
from tests.baton_engine.whole_engine import BLOCK_TOKENS, WholeEngine
from tests.baton_engine.whole_engine import hand_off as hand_off_pages

A, B, C = SeqId("a"), SeqId("b"), SeqId("c")
BEAMS = BeamSearchParams()
FAMILIES = ("llama", "mistral", "qwen3")
ENDS = tuple(range(5, 320, 12))
"""So many that some texts end before they are as long as they may be."""
OUTPUT_TOKENS = 12


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def reference(family: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(family, dtype=torch.float32)


def searched(tokens: list[int], rules: BeamSearchParams = BEAMS, **sampling) -> Prompt:
    return Prompt(
        prompt_tokens=tuple(tokens),
        samples=(0, 1, 2, 3),
        sampling=SamplingParams(max_tokens=OUTPUT_TOKENS, beam_search=rules, **sampling),
    )


def expected(reference: Any, asked: Prompt, early_stopping: bool | str = False) -> list[list[int]]:
    """What transformers finds, best first."""
    rules = asked.sampling.beam_search
    assert rules is not None
    tokens = torch.tensor([list(asked.prompt_tokens)])
    found = reference.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        num_beams=4,
        num_return_sequences=4,
        do_sample=False,
        max_new_tokens=OUTPUT_TOKENS,
        eos_token_id=list(ENDS),
        pad_token_id=0,
        early_stopping=early_stopping,
        length_penalty=rules.length_penalty,
    )
    texts = [row[len(asked.prompt_tokens) :].tolist() for row in found]
    return [_up_to_its_end(text) for text in texts]


def _up_to_its_end(text: list[int]) -> list[int]:
    end = next((i for i, token in enumerate(text, 1) if token in ENDS), len(text))
    return text[:end]


def found_by(engine: WholeEngine, seq_id: SeqId) -> list[list[int]]:
    told = engine.tokens(seq_id)
    return [[t.token for t in told if t.sample == sample] for sample in range(4)]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty"),
    [(False, 1.0), (False, 0.0), (True, 1.0), ("never", 2.5), ("never", -1.0)],
)
def test_beams_are_those_of_transformers(family, reference, early_stopping, length_penalty):
    rules = BeamSearchParams(
        length_penalty=length_penalty, early_stopping=EarlyStopping(str(early_stopping).lower())
    )
    engine, ended = WholeEngine(family, eos_ids=ENDS), 0
    for tokens in random_prompts(2, 40):
        asked = searched(tokens, rules)
        seq_id = SeqId(f"s{tokens}")
        engine.tell(Generate(seq_id=seq_id, prompt=asked))
        engine.run()
        assert found_by(engine, seq_id) == expected(reference, asked, early_stopping)
        ended += sum(t.finish is FinishReason.STOP for t in engine.tokens(seq_id))
    assert ended or length_penalty > 0.0
    assert engine.scheduler.load().blocks_used == 0


def test_they_are_after_a_hand_off_too(family, reference):
    source, target = (WholeEngine(family, eos_ids=ENDS, deterministic=False) for _ in range(2))
    for tokens in ([*range(40, 72)], *random_prompts(2, 40)):  # the first one fills its pages
        asked, seq_id = searched(tokens), SeqId(f"s{tokens}")
        source.tell(Prefill(seq_id=seq_id, prompt=asked))
        target.tell(Receive(seq_id=seq_id, prompt=asked))
        exports = _exports(source)
        target.step()
        hand_off_pages(source, target, seq_id, exports)
        source.tell(Release(seq_id=seq_id))
        target.run()
        assert not source.tokens(seq_id)
        assert found_by(target, seq_id) == expected(reference, asked)
    for engine in (source, target):
        assert engine.scheduler.load().blocks_used == 0


def _exports(source: WholeEngine) -> list[int]:
    plan, _ = source.scheduler.schedule(0.0)
    assert plan is not None
    result = source.runner.execute(plan)
    assert source.scheduler.update_from_output(plan, result, 0.0) is None
    assert [type(told) for told in source.scheduler.take_computed()] == [PromptComputed]
    (export,) = plan.exports
    return list(export.blocks)


def test_log_probabilities_are_told_of_the_texts_that_were_found(family):
    (tokens,) = random_prompts(1, BLOCK_TOKENS)
    engine = WholeEngine(family, eos_ids=ENDS)
    engine.tell(Generate(seq_id=A, prompt=searched(tokens, logprobs=2)))
    engine.run()
    for sample in range(4):
        text = [token for token in engine.tokens(A) if token.sample == sample]
        scored = WholeEngine(family)
        output = tuple(token.token for token in text)
        asked = Prompt(
            prompt_tokens=(*tokens, *output),
            sampling=SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2),
        )
        scored.tell(Generate(seq_id=B, prompt=asked))
        scored.run()
        for token, score in zip(text, scored.scores(B)[len(tokens) - 1 :], strict=True):
            assert token.logprobs is not None
            assert token.logprobs.logprob == pytest.approx(score.logprob, abs=1e-5)
            assert token.logprobs.rank == score.rank
            assert token.logprobs.top_tokens == score.top_tokens


def asked_of(world: World, tokens: int | tuple[int, ...], width: int = 3, **fields) -> Prompt:
    return prompt(tokens, samples=width, beam_search=BEAMS, **fields)


def assert_found(world: World, seq_id: SeqId, asked: Prompt) -> None:
    for sample in asked.samples:
        assert world.tokens(seq_id, sample) == world.undisturbed(asked, sample)


def test_nothing_is_told_before_the_end_and_then_every_text_in_one_message():
    world = World(limits(), eos_ids=(3,))
    asked = asked_of(world, 10, max_tokens=9)
    world.tell(Generate(seq_id=A, prompt=asked))
    world.run()
    kinds = [type(event) for event in world.events]
    assert kinds == [PrefillStarted, PromptComputed, Sampled]
    assert_found(world, A, asked)
    assert {world.finish(A, sample) for sample in asked.samples} <= {
        FinishReason.LENGTH,
        FinishReason.STOP,
    }
    world.assert_empty()


def test_beams_share_full_pages_and_only_the_page_that_both_write_to_is_copied():
    world = World(limits(block_tokens=4))
    asked = asked_of(world, 10, max_tokens=30)
    world.tell(Generate(seq_id=A, prompt=asked))
    world.run()
    assert_found(world, A, asked)
    for plan in world.plans[1:]:
        lengths = {row.start + 1 for row in plan.rows}
        assert len(lengths) == 1
        held = [tuple(row.seq.blocks) for row in plan.rows]
        assert all(len(blocks) <= 1 + lengths.copy().pop() // 4 for blocks in held)
        # A text whose last page is full goes on in a new one, whoever shares the full one.
        if lengths.pop() % 4 == 1:
            assert plan.copies == ()
        assert len(plan.copies) < len(plan.rows)
    assert any(plan.copies for plan in world.plans)


def test_beams_that_run_out_of_pages_begin_anew_together_and_find_the_same():
    world = World(limits(num_blocks=16, block_tokens=4))
    first = prompt(32, max_tokens=24)
    asked = asked_of(world, tuple(range(100, 106)), max_tokens=16)
    world.tell(Generate(seq_id=A, prompt=first), Generate(seq_id=B, prompt=asked))
    world.run()
    assert world.scheduler.load().preemptions
    assert len(world.told(PrefillStarted, B)) > 1
    assert world.tokens(A) == world.undisturbed(first)
    assert_found(world, B, asked)
    world.assert_empty()


def test_beams_that_find_too_little_room_beside_a_hand_off_wait_for_its_end():
    world = World(limits(num_blocks=10, block_tokens=4))
    world.tell(Prefill(seq_id=B, prompt=prompt(16)))
    world.run()
    asked = asked_of(world, tuple(range(100, 106)), max_tokens=8)
    world.tell(Generate(seq_id=A, prompt=asked))
    world.run()
    assert world.scheduler.load().preemptions == 1
    world.tell(Release(seq_id=B))
    world.run()
    assert_found(world, A, asked)
    world.assert_empty()


@pytest.mark.parametrize("steps", range(1, 8))
def test_an_abort_at_any_moment_leaves_no_page_behind(steps):
    world = World(limits(block_tokens=2))
    world.tell(Generate(seq_id=A, prompt=asked_of(world, 5, max_tokens=9)))
    for _ in range(steps):
        world.step()
    world.tell(Abort(seq_id=A))
    assert len(world.told(Released, A)) == 1
    world.assert_empty()


def test_a_beam_whose_row_fails_ends_the_search_and_nothing_else():
    world = World(limits(), enable_prefix_caching=False)
    other = prompt(7, max_tokens=9)
    world.tell(Generate(seq_id=B, prompt=other))
    world.tell(Generate(seq_id=A, prompt=asked_of(world, 5, max_tokens=9)))
    world.step()
    world.step()
    world.step(failing_row=2)
    assert world.error_of(A)
    world.run()
    assert world.tokens(B) == world.undisturbed(other)
    world.assert_empty()


def test_every_beam_counts_as_a_sequence_that_runs():
    world = World(limits(max_num_seqs=5))
    for seq_id in (A, B):
        world.tell(Generate(seq_id=seq_id, prompt=asked_of(world, 6, max_tokens=4)))
    world.step()
    world.step()
    assert (world.scheduler.load().running, world.scheduler.load().waiting) == (3, 1)
    world.run()
    for seq_id in (A, B):
        assert_found(world, seq_id, asked_of(world, 6, max_tokens=4))
    world.assert_empty()


def test_a_step_of_beams_is_not_planned_ahead():
    world = World(limits())
    world.tell(Generate(seq_id=A, prompt=asked_of(world, 6, max_tokens=9)))
    world.step()
    plan, _ = world.scheduler.schedule(0.0)
    assert plan is not None
    assert world.scheduler.plan_ahead() is None


def test_a_received_prompt_has_its_last_token_computed_again_in_a_page_of_its_own():
    source, target = World(limits(block_tokens=4)), World(limits(block_tokens=4))
    asked = asked_of(source, 12, max_tokens=6)
    target.tell(Generate(seq_id=C, prompt=prompt(12, max_tokens=6)))
    target.step()  # another text holds the same pages, and reads them
    source.tell(Prefill(seq_id=A, prompt=asked))
    target.tell(Receive(seq_id=A, prompt=asked))
    source.step()
    target.step()
    hand_off(source, target, A)
    source.tell(Release(seq_id=A))
    target.step()
    (row,) = [row for row in target.plans[-1].rows if row.seq.seq_id == A]
    assert (row.start, row.num_tokens) == (11, 1)
    target.run()
    assert_found(target, A, asked)
    for world in (source, target):
        world.assert_empty()


def test_a_search_takes_no_first_tokens_from_elsewhere():
    source, target = World(limits()), World(limits())
    asked = prompt(6, samples=1, beam_search=BEAMS)
    source.tell(Prefill(seq_id=A, prompt=prompt(6)))
    target.tell(Receive(seq_id=A, prompt=asked))
    source.step()
    target.step()
    (sampled,) = source.told(Sampled, A)
    target.tell(Start(seq_id=A, first_tokens=sampled.tokens))
    assert isinstance(target.error_of(A), InvalidRequestError)
    target.assert_empty()


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (prompt(4, samples=6, beam_search=BEAMS), "n"),
        (prompt(4, samples=1, output=(1, 2), beam_search=BEAMS), "n"),
        (prompt(8, samples=4, max_tokens=40, beam_search=BEAMS), "max_tokens"),
    ],
)
def test_what_can_never_be_searched_for_is_refused(asked, param):
    world = World(limits(vocab_size=10, num_blocks=32))
    world.tell(Generate(seq_id=A, prompt=asked))
    error = world.error_of(A)
    assert isinstance(error, InvalidRequestError | PromptTooLongError)
    assert error.param == param
    world.assert_empty()


def test_as_many_pages_as_beams_can_need_suffice():
    world = World(limits(num_blocks=32, block_tokens=4))
    asked = asked_of(world, 8, width=4, max_tokens=29)  # 2 that are shared, 7 for each beam
    world.tell(Generate(seq_id=A, prompt=asked))
    world.run()
    assert_found(world, A, asked)
    assert not world.scheduler.load().preemptions
