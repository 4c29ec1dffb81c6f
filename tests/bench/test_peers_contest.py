"""Servers that take turns, on the load generator's stand-in for a server."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest

from bench.peers.contenders import NAMES, OURS, Contender, Terms, contenders
from bench.peers.contest import Contest, Sizes
from tests.bench.conftest import Served

SIZES = Sizes(
    vocab=100, requests=1, input_tokens=3, output_tokens=2, prompt_tokens=9, prompt_clients=2
)


class Server:
    """Counts how often it was started, and whether it was stopped again."""

    def __init__(self, served: Served, fault: Exception | None = None) -> None:
        self.url = served.url
        self.fault = fault
        self.started = 0
        self.running = False

    @contextmanager
    def start(self) -> Iterator[str]:
        self.started += 1
        if self.fault is not None:
            raise self.fault
        self.running = True
        try:
            yield self.url
        finally:
            self.running = False


def test_a_server_that_does_not_come_up_is_absent_with_its_reason_and_the_others_are_measured(
    served: Served,
) -> None:
    broken, sound = Server(served, RuntimeError("no such model")), Server(served)
    entries = {
        "vllm": Contender(start=broken.start, clients=[1]),
        "hybrid": Contender(start=sound.start, clients=[1]),
    }
    contest = Contest("tiny", entries, SIZES)
    assert list(contest.run(rounds=2)) == ["vllm", "hybrid", "hybrid"]
    assert contest.absent == {"vllm": "RuntimeError: no such model"}
    assert len(contest.measured[("hybrid", "c1")]) == 2
    assert broken.started == 1
    assert not sound.running


def test_a_server_that_answers_wrongly_is_absent_from_its_first_answer_on(
    served: Served,
) -> None:
    server = Server(served)
    entries = {"pd": Contender(start=server.start, clients=[1, 2])}
    contest = Contest("tiny", entries, replace(SIZES, output_tokens=3))
    assert list(contest.run(rounds=1)) == ["pd"]
    assert contest.absent == {"pd": "RuntimeError: 2 tokens generated, 3 asked"}
    assert contest.measured == {}
    assert not server.running


def test_a_server_that_hangs_up_keeps_what_it_gave_before(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang_up(*_: object, **__: object) -> None:
        raise httpx.ReadError("hung up")

    monkeypatch.setattr("bench.peers.contest.run_under", hang_up)
    entries = {"pd": Contender(start=Server(served).start, clients=[1], under_prompts=True)}
    contest = Contest("tiny", entries, SIZES)
    assert list(contest.run(rounds=1)) == ["pd"]
    assert contest.absent == {"pd": "ReadError: hung up"}
    assert contest.measured.keys() == {("pd", "c1")}


def test_everybody_gets_the_same_prompts_and_every_turn_new_ones(served: Served) -> None:
    entries = {name: Contender(start=Server(served).start, clients=[2]) for name in ("a", "b")}
    turns = []
    for _ in Contest("tiny", entries, SIZES).run(rounds=2):
        turns.append(sorted(map(tuple, served.prompts)))
        served.prompts.clear()
    assert turns[0] == turns[1]
    assert turns[2] == turns[3]
    assert not set(turns[0]) & set(turns[2])


def test_arriving_prompts_are_a_level_of_their_own(served: Served) -> None:
    entry = {"pd": Contender(start=Server(served).start, clients=[], under_prompts=True)}
    contest = Contest("tiny", entry, SIZES)
    assert list(contest.run(rounds=1)) == ["pd"]
    assert contest.absent == {}
    assert contest.measured.keys() - {("pd", "arriving")} == {("pd", "prompts")}
    assert all(contest.measured.values())
    assert 9 in {len(prompt) for prompt in served.prompts}


def test_decodes_under_arriving_prompts_are_warmed_up_at_their_number(served: Served) -> None:
    entry = {"pd": Contender(start=Server(served).start, clients=[], under_prompts=True)}
    list(Contest("tiny", entry, SIZES).run(rounds=1))
    warming = 1 + SIZES.prompt_clients  # one alone, and one of each client
    measured = 2 * SIZES.prompt_clients
    assert sum(len(prompt) == SIZES.input_tokens for prompt in served.prompts) == warming + measured


def test_who_has_no_load_is_not_started(served: Served) -> None:
    server = Server(served)
    contest = Contest("tiny", {"int8": Contender(start=server.start, clients=[])}, SIZES)
    assert list(contest.run(rounds=1)) == []
    assert server.started == 0


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("vllm", "llamacpp"))])
def test_a_peer_that_nobody_named_says_so(name: str, tmp_path) -> None:
    terms = Terms(
        dtype="auto", tbt_target_s=0.1, clients=[1, 8], vllm_python="", llamacpp_server=""
    )
    with pytest.raises(RuntimeError, match="was named"), contenders(tmp_path, terms)[name].start():
        pass


def test_a_pair_hands_off_prompts_of_any_length(tmp_path, monkeypatch) -> None:
    told: list[dict[str, str]] = []

    @contextmanager
    def stand_in(*_: str, settings: dict[str, str]) -> Iterator[str]:
        told.append(settings)
        yield "http://pair"

    monkeypatch.setattr("bench.peers.contenders.serving", stand_in)
    terms = Terms(dtype="auto", tbt_target_s=0.1, clients=[1], vllm_python="", llamacpp_server="")
    with contenders(tmp_path, terms)["pd"].start():
        assert told == [{"BATON_ROUTER_LOCAL_PREFILL_TOKENS": "0"}]


def test_all_have_the_load_of_one_client_and_few_that_of_more(tmp_path) -> None:
    terms = Terms(
        dtype="auto", tbt_target_s=0.1, clients=[1, 8], vllm_python="", llamacpp_server=""
    )
    clients = {name: list(entry.clients) for name, entry in contenders(tmp_path, terms).items()}
    assert list(clients) == list(NAMES)
    assert set(OURS) < set(NAMES)
    assert clients["hybrid"] == clients["vllm"] == clients["llamacpp"] == [1, 8]
    assert clients["int8"] == clients["pd"] == clients["llamacpp_q8_0"] == [1]
