import pytest

from baton.errors import ConfigError
from bench.harness.trace import read_trace

LINE = '{"timestamp": %d, "input_length": %d, "output_length": 3, "hash_ids": %s}\n'


def test_equal_blocks_are_equal_tokens_and_others_differ(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE % (0, 1500, [1, 2, 3]) + LINE % (2500, 1024, [1, 4]))
    first, second = read_trace(path, 10)
    assert second.at_s == 2.5
    assert [len(first.tokens()), len(second.tokens())] == [1500, 1024]
    assert first.tokens()[:512] == second.tokens()[:512]
    assert first.tokens()[512:1024] != second.tokens()[512:]


def test_only_the_first_requests_are_read(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text((LINE % (0, 10, [1])) * 5 + "no JSON")
    assert len(read_trace(path, 5)) == 5
    with pytest.raises(ConfigError, match=r"trace\.jsonl, line 6: JSON is malformed"):
        read_trace(path, 6)


def test_a_trace_without_a_request_is_refused_by_name(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("")
    with pytest.raises(ConfigError, match=r"trace\.jsonl: no request"):
        read_trace(path, 10)


def test_a_line_of_another_format_is_refused_by_its_number(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE % (0, 10, [1]) + '{"timestamp": 1}\n')
    with pytest.raises(ConfigError, match=r"trace\.jsonl, line 2: .*`input_length`"):
        read_trace(path, 10)
