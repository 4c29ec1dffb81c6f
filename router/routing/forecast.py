"""What a worker will take for its work: coefficients learned from what it took, and what the router has queued there.

Every `WorkerView` has a `Forecast`. Measurements come with the messages of legs (`router.dispatch.dispatcher`) and with
load reports. What the policy `predictive` prices with lies in records for C, where pricing a worker takes a few
multiplications.
"""

import ctypes
from math import exp, log

from baton.errors import InvariantError
from baton.fit import Fit
from baton.generation import WorkerLoad
from baton.ids import LegId

_PREFILL_PRIOR = (0.005, 1e-4, 1e-9)
"""Per prompt; per token computed; per pair of a computed token and one that it attends to."""

_STEP_PRIOR = (0.01, 5e-5, 1e-7)
"""Per step; per sequence; per token of context."""

_FETCH_PRIOR = (5e-4, 1e-5)
"""Per prompt of which something is fetched from the pool; per token fetched. Quick enough to be tried."""

_STEP_INTERVAL_S = 0.25
"""A worker takes many steps per second and says the same with each."""

_PRIOR_BYTES_PER_S = 10e9
_PRIOR_LATENCY_S = 0.002
_SLOWEST, _FASTEST = 1e4, 1e13
_LONGEST_LATENCY_S = 10.0
_MOST_BYTES, _LONGEST_S = 1e15, 3600.0
_GAIN = 0.2
_LARGEST_MOVE = log(4.0)
"""How far one hand-off can move an estimate: a stall is no news about the link."""


class LinkRecord(ctypes.Structure):
    """See `router.routing.forecast.Link`."""

    __slots__ = ()

    bytes_per_s: float
    latency_s: float

    _fields_ = (("bytes_per_s", ctypes.c_double), ("latency_s", ctypes.c_double))


class Link(LinkRecord):
    """Bandwidth and fixed cost of handing KV over, for one pair of workers or for all of them.

    Pages leave layer by layer while the prompt is computed, so mostly only the last ones are seen to take time: such a
    hand-off says what the fixed cost is and that the bandwidth is at least so high. One that outlasted the computing
    says what the bandwidth is.

    Args:
        like: Where to begin; an ordinary fast network if None.
    """

    __slots__ = ("_log_bandwidth", "measured")

    def __init__(self, like: "Link | None" = None) -> None:
        super().__init__()
        self.bytes_per_s = _PRIOR_BYTES_PER_S if like is None else like.bytes_per_s
        self.latency_s = _PRIOR_LATENCY_S if like is None else like.latency_s
        self.measured = 0
        self._log_bandwidth = log(self.bytes_per_s)

    def unhidden_s(self, size_bytes: float, window_s: float) -> float:
        """How long the hand-off of `size_bytes` goes on after `window_s` of computing."""
        return self.latency_s + max(0.0, size_bytes / self.bytes_per_s - window_s)

    def handed_off(self, size_bytes: float, window_s: float, unhidden_s: float) -> None:
        """Takes one measurement; what cannot be one is ignored.

        Args:
            size_bytes: Sent.
            window_s: Time from the grant of pages to the first token: sending could be hidden behind it.
            unhidden_s: Time from the first token to the commit.
        """
        if not (
            1.0 <= size_bytes <= _MOST_BYTES
            and 0.0 <= window_s <= _LONGEST_S
            and 0.0 <= unhidden_s <= _LONGEST_S
        ):
            return
        self.measured += 1
        hidden = unhidden_s <= 2.0 * self.latency_s or window_s > 50.0 * unhidden_s
        if hidden:
            self._learn_latency(unhidden_s)
        sending_s = window_s + max(unhidden_s - self.latency_s, 0.1 * unhidden_s)
        seen = log(size_bytes / max(sending_s, 1e-6))
        if hidden and seen <= self._log_bandwidth:
            return  # it may well be faster: nothing kept it busy all the time
        move = min(max(seen - self._log_bandwidth, -_LARGEST_MOVE), _LARGEST_MOVE)
        self._log_bandwidth += move * (1.0 if hidden else self._gain())
        self._log_bandwidth = min(max(self._log_bandwidth, log(_SLOWEST)), log(_FASTEST))
        self.bytes_per_s = exp(self._log_bandwidth)

    def check_integrity(self) -> None:
        """Raises `InvariantError` when an estimate is out of all bounds."""
        if not (_SLOWEST * 0.99 <= self.bytes_per_s <= _FASTEST * 1.01):
            raise InvariantError(f"{self.bytes_per_s} bytes/s")
        if not 0.0 <= self.latency_s <= _LONGEST_LATENCY_S:
            raise InvariantError(f"latency of {self.latency_s} s")

    def _gain(self) -> float:
        return max(_GAIN, 1.0 / self.measured)

    def _learn_latency(self, unhidden_s: float) -> None:
        believed = min(unhidden_s, 4.0 * self.latency_s + 1e-3, _LONGEST_LATENCY_S)
        self.latency_s += _GAIN * (believed - self.latency_s)


class Costs:
    """Coefficients that measurements teach. They lie at one address as long as this lives, so that C reads there what
    was learned last.

    Args:
        prior: Coefficients to begin with, all above zero.

    Attributes:
        coefficients: After the last measurement.
        address: Of the same numbers, as doubles.
    """

    __slots__ = ("_fit", "_numbers", "_prior", "address", "coefficients")

    def __init__(self, prior: tuple[float, ...]) -> None:
        self._prior = prior
        self._fit = Fit(prior)
        self._numbers = (ctypes.c_double * len(prior))()
        self.address = ctypes.addressof(self._numbers)
        self._show()

    @property
    def taught(self) -> bool:
        """Whether there was a measurement."""
        return self._fit.taught

    def measure(self, features: tuple[float, ...], seconds: float) -> None:
        """Takes one measurement; see `Fit.measure`."""
        self._fit.measure(features, seconds)
        self._show()

    def successor(self) -> "Costs":
        """Others that begin where these stand; where one is zero, a little above: a prior has to be."""
        pairs = zip(self.coefficients, self._prior, strict=True)
        return Costs(tuple(max(learned, 1e-3 * least) for learned, least in pairs))

    def check_integrity(self) -> None:
        """Raises `InvariantError` when a coefficient is negative or no number."""
        self._fit.check_integrity()

    def _show(self) -> None:
        self.coefficients = self._fit.coefficients
        self._numbers[:] = [*self.coefficients]


class Fleet:
    """What all workers have in common: what is expected of each until it has been measured itself, and of links that
    have not been used yet.
    """

    def __init__(self) -> None:
        self.prefill = Costs(_PREFILL_PRIOR)
        self.step = Costs(_STEP_PRIOR)
        self.fetch = Costs(_FETCH_PRIOR)
        self.link = Link()


class ForecastRecord(ctypes.Structure):
    """See `Forecast`. `links_address` is that of an array of addresses of `LinkRecord`, by slot, with 0 for what
    `fleet_link_address` stands for; the next three are those of `Costs`.
    """

    __slots__ = ()

    links_address: int
    fleet_link_address: int
    prefill_address: int
    step_address: int
    fetch_address: int
    num_links: int
    ready_s: float
    behind_s: float

    _fields_ = (
        ("links_address", ctypes.c_void_p),
        ("fleet_link_address", ctypes.c_void_p),
        ("prefill_address", ctypes.c_void_p),
        ("step_address", ctypes.c_void_p),
        ("fetch_address", ctypes.c_void_p),
        ("num_links", ctypes.c_int64),
        ("ready_s", ctypes.c_double),
        ("behind_s", ctypes.c_double),
    )

    __hash__ = object.__hash__


class Forecast(ForecastRecord):
    """One worker's. What has not been measured there is as it is elsewhere: its record points at what the fleet has
    learned, until there is something of its own.

    Attributes:
        ready_s: When this router's prompts there should be computed; the past when none is.
        behind_s: Seconds of work behind the prompt that is being computed: the queue is never shorter than that.

    Args:
        fleet: Of which it is a part.
    """

    __slots__ = (
        "_backlog", "_backlog_s", "_fetch", "_fleet", "_link_addresses", "_links", "_prefill", "_since_s", "_step",
        "_stepped_s",
    )  # fmt: skip

    def __init__(self, fleet: Fleet | None = None) -> None:
        super().__init__()
        self._fleet = fleet = fleet or Fleet()
        self._prefill, self._step, self._fetch = fleet.prefill, fleet.step, fleet.fetch
        self._links: dict[int, Link] = {}
        self._link_addresses = (ctypes.c_void_p * 0)()
        self.fleet_link_address = ctypes.addressof(fleet.link)
        self.prefill_address = fleet.prefill.address
        self.step_address = fleet.step.address
        self.fetch_address = fleet.fetch.address
        self._backlog: dict[LegId, float] = {}
        self._backlog_s = 0.0
        self._since_s = 0.0
        self._stepped_s = float("-inf")
        self.ready_s = float("-inf")
        self.behind_s = 0.0

    @property
    def knows_prefill(self) -> bool:
        """Whether any worker has computed a prompt."""
        return self._fleet.prefill.taught

    @property
    def knows_steps(self) -> bool:
        """Whether any worker has taken a step that only decoded."""
        return self._fleet.step.taught

    @property
    def token_s(self) -> float:
        """Seconds per token computed."""
        return self._prefill.coefficients[1]

    @property
    def step_costs(self) -> tuple[float, ...]:
        """Seconds per decode step, per sequence in it and per token of context in it."""
        return self._step.coefficients

    def prefill_s(self, uncached: int, cached: int) -> float:
        """Seconds from the first chunk to the first token: `uncached` tokens computed after `cached` ones."""
        prompt_s, token_s, attention_s = self._prefill.coefficients
        pairs = uncached * (cached + 0.5 * uncached)
        return prompt_s + token_s * uncached + attention_s * pairs

    def fetching_s(self, tokens: int) -> float:
        """Seconds to bring the KV of `tokens` tokens from the node of its host."""
        fetch_s, token_s = self._fetch.coefficients
        return fetch_s + token_s * tokens

    def tbt_s(self, sequences: int, context_tokens: int) -> float:
        """Seconds of a decode step."""
        step_s, sequence_s, context_s = self._step.coefficients
        return step_s + sequence_s * sequences + context_s * context_tokens

    def queue_s(self, now_s: float) -> float:
        """Seconds until this router's prompts there are computed."""
        return max(self.ready_s - now_s, self.behind_s)

    def link_to(self, slot: int) -> Link:
        """The link to the worker with that slot; what is known of all links, until one of it has been used."""
        return self._links.get(slot, self._fleet.link)

    def queued(self, leg_id: LegId, seconds: float, now_s: float) -> None:
        """A prompt was sent there that should take `seconds`."""
        if not self._backlog:
            self._since_s = now_s
        self._backlog[leg_id] = seconds
        self._backlog_s += seconds
        self._plan()

    def left(self, leg_id: LegId, now_s: float | None = None) -> None:
        """It is computed, or will not be; nothing if that was known. With `now_s`, what came after it begins now."""
        seconds = self._backlog.get(leg_id)
        if seconds is None:
            return
        if now_s is not None and next(iter(self._backlog)) == leg_id:
            self._since_s = now_s
        del self._backlog[leg_id]
        self._backlog_s = self._backlog_s - seconds if self._backlog else 0.0
        self._plan()

    def prefilled(self, uncached: int, cached: int, seconds: float) -> None:
        """A prompt was computed there."""
        features = (1.0, float(uncached), uncached * (cached + 0.5 * uncached))
        common = self._fleet.prefill
        if self._prefill is common:
            self._prefill = common.successor()
            self.prefill_address = self._prefill.address
        self._prefill.measure(features, seconds)
        common.measure(features, seconds)

    def stepped(self, sequences: int, context_tokens: int, seconds: float, now_s: float) -> None:
        """A step that only decoded was taken there. Looked at a few times per second."""
        if now_s - self._stepped_s < _STEP_INTERVAL_S:
            return
        self._stepped_s = now_s
        features = (1.0, float(sequences), float(context_tokens))
        common = self._fleet.step
        if self._step is common:
            self._step = common.successor()
            self.step_address = self._step.address
        self._step.measure(features, seconds)
        common.measure(features, seconds)

    def fetches_reported(self, before: WorkerLoad, load: WorkerLoad, block_tokens: int) -> None:
        """Learns from what its worker fetched between two reports."""
        fetches = load.pool_fetches - before.pool_fetches
        blocks = load.pool_fetched_blocks - before.pool_fetched_blocks
        if fetches > 0 and blocks > 0:
            self.fetched(fetches, blocks * block_tokens, load.pool_fetch_s - before.pool_fetch_s)

    def fetched(self, prompts: int, tokens: int, seconds: float) -> None:
        """So many tokens of so many prompts were fetched there."""
        features = (float(prompts), float(tokens))
        common = self._fleet.fetch
        if self._fetch is common:
            self._fetch = common.successor()
            self.fetch_address = self._fetch.address
        self._fetch.measure(features, seconds)
        common.measure(features, seconds)

    def handed_off(self, slot: int, size_bytes: int, window_s: float, unhidden_s: float) -> None:
        """KV went from here to the worker with that slot; see `Link.handed_off`."""
        if slot not in self._links:
            self._add_link(slot)
        self._links[slot].handed_off(size_bytes, window_s, unhidden_s)
        self._fleet.link.handed_off(size_bytes, window_s, unhidden_s)

    def parted(self, slot: int) -> None:
        """The worker with that slot is gone: another one may get it."""
        if self._links.pop(slot, None) is not None:
            self._link_addresses[slot] = None

    def check_integrity(self) -> None:
        """Raises `InvariantError` when a coefficient is out of bounds or the backlog does not add up."""
        for costs in (self._prefill, self._step, self._fetch):
            costs.check_integrity()
        for link in self._links.values():
            link.check_integrity()
        if abs(sum(self._backlog.values()) - self._backlog_s) > 1e-6 * (1.0 + self._backlog_s):
            raise InvariantError(f"backlog of {self._backlog_s} s for {self._backlog}")

    def _add_link(self, slot: int) -> None:
        self._links[slot] = Link(self._fleet.link)
        num_links = max(len(self._link_addresses), slot + 1)
        addresses = (ctypes.c_void_p * num_links)(*self._link_addresses)
        addresses[slot] = ctypes.addressof(self._links[slot])
        self.links_address, self.num_links = ctypes.addressof(addresses), num_links
        self._link_addresses = addresses

    def _plan(self) -> None:
        if not self._backlog:
            self.ready_s, self.behind_s = float("-inf"), 0.0
            return
        self.ready_s = self._since_s + self._backlog_s
        self.behind_s = max(0.0, self._backlog_s - next(iter(self._backlog.values())))
