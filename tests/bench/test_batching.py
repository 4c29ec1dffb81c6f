from bench.batching import batches
from bench.simulated.engine import Life


def test_texts_that_join_and_leave_keep_an_engine_busier_than_batches():
    figures = batches(seed=1, requests=128)
    assert figures["utilisation_static"] < 0.7 * figures["utilisation_continuous"]
    assert figures["tokens_per_s_continuous"] > 1.2 * figures["tokens_per_s_static"]


def test_a_life_knows_its_times():
    life = Life(arrived_s=1.0, tokens_s=[1.5, 1.75, 2.75])
    assert (life.ttft_s, life.gaps_s) == (0.5, [0.25, 1.0])
