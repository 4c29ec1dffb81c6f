import json
from random import Random

import pytest

from bench.harness.trace import read_trace
from bench.route_replay import Summary, main
from bench.simulated.cluster import Replay
from bench.simulated.hardware import Hardware


@pytest.fixture
def trace(tmp_path):
    """A minute of conversations that come back with longer prompts, in Mooncake's format."""
    rng, lines, blocks = Random(0), [], 0
    talks: list[list[int]] = [[] for _ in range(6)]
    for number in range(60):
        talk = talks[rng.randrange(6)]
        for _ in range(rng.randint(1, 12)):
            blocks += 1
            talk.append(blocks)
        lines.append(
            {
                "timestamp": 250 * number,
                "input_length": 512 * len(talk) - rng.randrange(500),
                "output_length": rng.randint(1, 40),
                "hash_ids": list(talk),
            }
        )
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


HARDWARE = Hardware(prefill_workers=3, decode_workers=2)


def test_every_request_is_served_to_its_end(trace):
    requests = read_trace(trace, 60)
    outcome = Replay(requests, HARDWARE).run("predictive", speedup=1.0, seed=0)
    assert len(outcome.served) == 60
    assert all(served.first_s > served.came_s for served in outcome.served)
    assert all(served.last_s >= served.first_s for served in outcome.served)
    assert sum(served.cached_tokens for served in outcome.served) > 0


def test_a_replay_is_the_same_every_time(trace):
    replay = Replay(read_trace(trace, 60), HARDWARE)
    once, again = (replay.run("predictive", speedup=2.0, seed=1) for _ in range(2))
    assert Summary.of(once) == Summary.of(again)


def test_predicting_beats_chance(trace):
    replay = Replay(read_trace(trace, 60), HARDWARE)
    predictive, random = (
        Summary.of(replay.run(policy, speedup=2.0, seed=0)) for policy in ("predictive", "random")
    )
    assert predictive.ttft_mean_s < random.ttft_mean_s
    assert predictive.ttft_p90_s < random.ttft_p90_s


def test_the_report_has_the_figures_of_each_policy(trace, tmp_path):
    out = tmp_path / "report.json"
    arguments = ["--trace", str(trace), "--requests", "20", "--json", str(out)]
    main([*arguments, "--policies", "predictive", "session"])
    figures = json.loads(out.read_text())["figures"]
    for policy in ("predictive", "session", "predictive_heavy"):
        assert figures[f"ttft_mean_s_{policy}"] > 0
        assert figures[f"ttft_p90_s_{policy}"] > 0
        assert 0 <= figures[f"tbt_attainment_{policy}"] <= 1


def test_an_operators_own_policy_is_compared_by_its_class(trace, tmp_path):
    own, out = "examples.routing_policy:SpotLast", tmp_path / "report.json"
    arguments = ["--trace", str(trace), "--requests", "20", "--json", str(out)]
    main([*arguments, "--policies", own, "random"])
    document = json.loads(out.read_text())
    assert document["settings"]["policies"] == [own, "random"]
    assert document["figures"][f"ttft_mean_s_{own}"] > 0


@pytest.mark.parametrize("name", ["no_such", "examples.routing_policy:NoSuch"])
def test_a_policy_that_is_not_there_ends_it_with_the_known_ones(trace, name):
    with pytest.raises(SystemExit, match=f"{name}: .*predictive"):
        main(["--trace", str(trace), "--policies", "random", name])


def test_workers_take_what_the_command_line_says(trace, tmp_path):
    figures = {}
    for tokens_per_s, step_s in (("20000", "0.01"), ("2000", "0.01"), ("20000", "0.06")):
        out = tmp_path / f"{tokens_per_s}-{step_s}.json"
        words = ["--trace", str(trace), "--requests", "20", "--policies", "random", "--uniform"]
        speeds = ["--prefill-tokens-per-s", tokens_per_s, "--step-s", step_s]
        main([*words, *speeds, "--json", str(out)])
        figures[tokens_per_s, step_s] = json.loads(out.read_text())["figures"]
    usual, slow_prompts, slow_steps = figures.values()
    assert slow_prompts["ttft_mean_s_random"] > 5 * usual["ttft_mean_s_random"]
    assert (usual["tbt_attainment_random"], slow_steps["tbt_attainment_random"]) == (1.0, 0.0)


def test_a_single_request_has_percentiles_too(trace):
    summary = Summary.of(
        Replay(read_trace(trace, 1), HARDWARE).run("predictive", speedup=1.0, seed=0)
    )
    assert summary.ttft_p90_s == summary.ttft_mean_s
