"""The replay of a trace through the pool's ledger finds what can be counted by hand."""

import json

import pytest

from bench import pool_trace
from bench.harness.trace import TracedRequest
from bench.kvpool.replay import replay, to_longest, unique_blocks


def requests(*prompts: tuple[int, ...]) -> list[TracedRequest]:
    return [
        TracedRequest(at_s=float(at), input_tokens=512 * len(p), output_tokens=1, blocks=p)
        for at, p in enumerate(prompts)
    ]


TURNS = requests((1, 2), (1, 9), (1, 2, 3), (1, 9, 4))


def test_with_room_for_all_every_block_that_came_before_is_a_hit():
    hits = replay(TURNS, eviction="lru", num_slots=10)
    assert (hits.asked_blocks, hits.hit_blocks) == (10, 5)
    assert unique_blocks(TURNS) == 5


def test_local_caches_do_not_help_each_other():
    assert replay(TURNS, eviction="lru", num_slots=10, num_nodes=2).hit_blocks == 4
    assert replay(TURNS, eviction="lru", num_slots=12, num_nodes=4).hit_blocks == 0
    aware = replay(TURNS, eviction="lru", num_slots=20, num_nodes=4, route=to_longest)
    assert aware.hit_blocks == 5


def test_it_reports_flat_figures(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 1024, "output_length": 1}
    trace.write_text("".join(json.dumps(line | {"hash_ids": ids}) + "\n" for ids in ([1, 2],) * 4))
    target = tmp_path / "report.json"
    pool_trace.main(
        f"--trace {trace} --json {target} --capacities 2 --caches 2 --local-tokens 1024".split()
    )
    figures = json.loads(target.read_text())["figures"]
    assert figures["unique_blocks"] == 2
    assert figures["block_hit_ratio_infinite"] == pytest.approx(0.75)
    assert figures["global_over_local_hit_ratio"] == pytest.approx(1.5)
    assert "2 different blocks" in capsys.readouterr().out


def test_an_empty_trace_is_told_and_not_divided_by(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("")
    with pytest.raises(SystemExit, match="no request"):
        pool_trace.main(["--trace", str(trace)])


def test_a_trace_without_a_hit_is_reported_without_gains(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 512, "output_length": 1}
    trace.write_text("".join(json.dumps(line | {"hash_ids": [n]}) + "\n" for n in range(3)))
    target = tmp_path / "report.json"
    pool_trace.main(["--trace", str(trace), "--capacities", "10", "--json", str(target)])
    figures = json.loads(target.read_text())["figures"]
    assert figures["block_hit_ratio_infinite"] == 0.0
    assert "global_over_local_hit_ratio" not in figures
