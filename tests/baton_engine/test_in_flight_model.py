"""A whole model on the CPU draws the same tokens, to the last bit of their log-probabilities, however early steps are launched."""

from dataclasses import replace
from pathlib import Path

import pytest

from baton.generation import Prompt, SamplingParams
from baton.ids import SeqId
from baton_engine.messages import Generate
from tests.baton_engine.looped import draw_all
from tests.baton_engine.tiny_models import make_model, random_prompts
from tests.baton_engine.whole_engine import WholeEngine

GREEDY = SamplingParams(temperature=0, max_tokens=24)
DRAWN = SamplingParams(
    temperature=0.9, max_tokens=17, seed=4, stop_token_ids=tuple(range(0, 320, 9))
)
ASKED = (
    GREEDY,
    DRAWN,
    replace(DRAWN, seed=5, top_k=20, top_p=0.9, min_p=0.01),
    replace(DRAWN, seed=6, logprobs=3, min_tokens=6),
    replace(GREEDY, max_tokens=40, logit_bias={7: 2.0}),
    replace(DRAWN, seed=7, max_tokens=6, frequency_penalty=0.5),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("ahead"), "qwen3")


def commands() -> list[Generate]:
    prompts = random_prompts(len(ASKED), 40, seed=3)
    return [
        Generate(
            seq_id=SeqId(f"s{place}"),
            prompt=Prompt(
                prompt_tokens=tuple(tokens),
                samples=(0, 1) if place == 1 else (0,),
                sampling=params,
            ),
        )
        for place, (tokens, params) in enumerate(zip(prompts, ASKED, strict=True))
    ]


@pytest.mark.parametrize("num_blocks", [64, 9], ids=["room for all", "preemptions"])
def test_a_model_draws_the_same_however_early_its_steps_are_launched(
    checkpoint: Path, num_blocks: int
):
    plain, ahead = (WholeEngine(checkpoint, num_blocks=num_blocks) for _ in range(2))
    expected, none = draw_all(plain.scheduler, plain.runner, commands(), ahead=False)
    drawn, launched_ahead = draw_all(ahead.scheduler, ahead.runner, commands(), ahead=True)
    assert drawn == expected
    assert (none, launched_ahead > 10) == (0, True)
    assert (plain.scheduler.load().preemptions > 0) == (num_blocks == 9)
