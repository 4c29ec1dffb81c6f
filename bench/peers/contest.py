"""One shape's servers in `bench.cpu_vs_peers`: starts them in turn, measures, notes which are absent and why."""

import asyncio
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import httpx

from bench.harness.load import Load, Outcome, run_load, run_under
from bench.peers.contenders import Contender
from bench.peers.figures import Measured

FAULTS = (
    RuntimeError,
    ImportError,
    OSError,
    ValueError,
    IndexError,
    httpx.HTTPError,
    subprocess.TimeoutExpired,
)
"""By which a server is noticed that does not start, ends, or does not serve what it was asked."""

_WARM_UP = 1_000_000
"""Seeds from here on are those of prompts that warm a server up; nothing that is measured has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What every server is asked.

    Attributes:
        vocab: Token ids are drawn below this.
        requests: Per client and turn; of one client three times as many.
        input_tokens: Per prompt.
        output_tokens: Per request.
        prompt_tokens: Of the prompts that keep arriving; 0 leaves that load out.
        prompt_clients: That decode meanwhile.
    """

    vocab: int
    requests: int
    input_tokens: int
    output_tokens: int
    prompt_tokens: int
    prompt_clients: int

    def load(self, clients: int, each: int) -> Load:
        """`each` requests of each of `clients`."""
        return Load(
            concurrency=clients,
            requests=clients * each,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            vocab=self.vocab,
        )

    def begun(self, clients: int) -> Load:
        """One request of each of `clients`, which goes on just until all decode."""
        return replace(self.load(clients, 1), output_tokens=min(4, self.output_tokens))

    def prompt(self) -> Load:
        """One of the prompts that keep arriving."""
        return Load(
            concurrency=1,
            requests=1,
            input_tokens=self.prompt_tokens,
            output_tokens=1,
            vocab=self.vocab,
        )


class Contest:
    """Runs the servers and keeps what they gave.

    Attributes:
        measured: Outcomes by server and level of load.
        absent: Why a server is missing, or what it was not measured for, by its name.
    """

    def __init__(self, shape: str, contenders: Mapping[str, Contender], sizes: Sizes) -> None:
        self.measured: Measured = {}
        self.absent: dict[str, str] = {}
        self._shape = shape
        self._contenders = contenders
        self._sizes = sizes

    def run(self, rounds: int) -> Iterator[str]:
        """Lets each have `rounds` turns; yields the server's name after each. A server that failed gets no more."""
        for turn in range(rounds):
            for name in self._contenders:
                if name not in self.absent and self._has_load(name):
                    self._turn(name, turn)
                    yield name

    def _has_load(self, name: str) -> bool:
        contender = self._contenders[name]
        return bool(contender.clients or (contender.under_prompts and self._sizes.prompt_tokens))

    def _turn(self, name: str, turn: int) -> None:
        try:
            with self._contenders[name].start() as url:
                self._measure(url, name, turn)
        except* FAULTS as faults:
            self.absent[name] = _reason(faults)
            print(f"{self._shape} {name:20} is absent: {self.absent[name]}", flush=True)

    def _measure(self, url: str, name: str, turn: int) -> None:
        contender, sizes = self._contenders[name], self._sizes
        _run(url, sizes.load(1, 1), seed=_WARM_UP + turn)
        for clients in contender.clients:
            if clients > 1:  # some prepare their products for each size of a batch
                _run(url, sizes.begun(clients), seed=_WARM_UP + 1000 * turn + clients)
            load = sizes.load(clients, sizes.requests * (3 if clients == 1 else 1))
            # Every server gets the same prompts; a turn's are new, so that no prefix cache helps.
            self._note(name, f"c{clients}", [_run(url, load, seed=1000 * turn + clients)])
        if contender.under_prompts and sizes.prompt_tokens:
            seed = _WARM_UP + 1000 * turn + 500
            _run(url, sizes.begun(sizes.prompt_clients), seed=seed)
            load = sizes.load(sizes.prompt_clients, 2 * sizes.requests)
            begun = run_under(url, "bench", load, sizes.prompt(), seed=1000 * turn + 500)
            outcome, arriving = asyncio.run(begun)
            self._note(name, "prompts", [outcome])
            self._note(name, "arriving", arriving)

    def _note(self, name: str, level: str, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            self.measured.setdefault((name, level), []).append(outcome)
            print(
                f"{self._shape} {name:20} {level:8} {outcome.output_tok_s:8.1f} tok/s   TTFT {outcome.ttft_ms:8.1f} ms   "
                f"TPOT {outcome.tpot_ms:7.2f} ms, p99 {outcome.tpot_p99_ms:7.2f}",
                flush=True,
            )


def _run(url: str, load: Load, *, seed: int) -> Outcome:
    return asyncio.run(run_load(url, "bench", load, seed=seed))


def _reason(faults: BaseExceptionGroup[BaseException]) -> str:
    """Of the first of them; a server's last words stand at the end of its message."""
    first: BaseException = faults
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return f"{type(first).__name__}: {first}"[-500:]
