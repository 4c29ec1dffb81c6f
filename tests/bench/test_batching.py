from baton.generation import Prompt, SamplingParams
from baton.ids import SeqId
from baton_engine.scheduling.ordering import SchedulingPolicy
from baton_engine.simulated import StepSpeed
from bench.batching import LIMITS, batches, feed
from bench.simulated.engine import Life, SteppedEngine


def test_texts_that_join_and_leave_keep_an_engine_busier_than_batches():
    figures = batches(seed=1, requests=128)
    assert figures["utilisation_static"] < 0.7 * figures["utilisation_continuous"]
    assert figures["tokens_per_s_continuous"] > 1.2 * figures["tokens_per_s_static"]


def test_a_life_knows_its_times():
    life = Life(arrived_s=1.0, tokens_s=[1.5, 1.75, 2.75])
    assert (life.ttft_s, life.gaps_s) == (0.5, [0.25, 1.0])


def test_a_request_that_comes_during_a_step_waits_for_the_rest_of_it():
    engine = SteppedEngine(LIMITS, SchedulingPolicy(), StepSpeed())
    prompt = Prompt(
        prompt_tokens=(1,) * 2000, sampling=SamplingParams(max_tokens=1, ignore_eos=True)
    )
    feed(engine, [(1.0, prompt), (1.001, prompt)])
    first, second = engine.lives[SeqId("p0")], engine.lives[SeqId("p1")]
    assert first.tokens_s[0] > 1.001
    assert (first.arrived_s, second.arrived_s) == (1.0, 1.001)
    assert second.ttft_s == second.tokens_s[0] - 1.001
