"""What a worker will take for its work: coefficients learned from what it took, and what the router has queued there.

Every `WorkerView` has a `Forecast`. Measurements come with the messages of legs (`router.dispatch.dispatcher`) and with
load reports; the policy `predictive` reads the flat numbers, which are there so that pricing a worker takes a few
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


class ForecastRecord(ctypes.Structure):
    """See `Forecast`. `links_address` is that of an array of addresses of `LinkRecord`, by slot, with 0 for what
    `fleet_link_address` stands for.
    """

    __slots__ = ()

    links_address: int
    fleet_link_address: int
    num_links: int
    prompt_s: float
    token_s: float
    attention_s: float
    step_s: float
    sequence_s: float
    context_s: float
    fetch_s: float
    fetch_token_s: float
    ready_s: float
    behind_s: float

    _fields_ = (
        ("links_address", ctypes.c_void_p),
        ("fleet_link_address", ctypes.c_void_p),
        ("num_links", ctypes.c_int64),
        ("prompt_s", ctypes.c_double),
        ("token_s", ctypes.c_double),
        ("attention_s", ctypes.c_double),
        ("step_s", ctypes.c_double),
        ("sequence_s", ctypes.c_double),
        ("context_s", ctypes.c_double),
        ("fetch_s", ctypes.c_double),
        ("fetch_token_s", ctypes.c_double),
        ("ready_s", ctypes.c_double),
        ("behind_s", ctypes.c_double),
    )

    __hash__ = object.__hash__


class Fleet:
    """What all workers have in common: where a new one's coefficients begin,
    and what is known of links not used yet.
    """

    def __init__(self) -> None:
        self.prefill = Fit(_PREFILL_PRIOR)
        self.step = Fit(_STEP_PRIOR)
        self.fetch = Fit(_FETCH_PRIOR)
        self.link = Link()
        self._members: dict[Forecast, None] = {}

    def newcomer(self) -> "Forecast":
        """The forecast for a worker that has not been measured yet."""
        forecast = Forecast(self)
        self._members[forecast] = None
        return forecast

    def prefilled(self, features: tuple[float, ...], seconds: float) -> None:
        """A worker computed a prompt."""
        self.prefill.measure(features, seconds)
        for forecast in self._members:
            forecast.follow()

    def stepped(self, features: tuple[float, ...], seconds: float) -> None:
        """A worker took a step that only decoded."""
        self.step.measure(features, seconds)
        for forecast in self._members:
            forecast.follow()

    def fetched(self, features: tuple[float, ...], seconds: float) -> None:
        """A worker fetched from the pool."""
        self.fetch.measure(features, seconds)
        for forecast in self._members:
            forecast.follow()

    def dismiss(self, forecast: "Forecast") -> None:
        """Its worker is gone."""
        self._members.pop(forecast, None)


class Forecast(ForecastRecord):
    """One worker's. The public numbers are for reading.

    Attributes:
        prompt_s: Fixed seconds per prompt.
        token_s: Seconds per token computed.
        attention_s: Seconds per pair of a computed token and one that it attends to.
        step_s: Fixed seconds per decode step.
        sequence_s: Seconds per sequence in a step.
        context_s: Seconds per token of context in a step.
        fetch_s: Fixed seconds per prompt of which something is fetched from the pool.
        fetch_token_s: Seconds per token fetched.
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
        self._fleet = fleet or Fleet()
        self._prefill: Fit | None = None
        self._step: Fit | None = None
        self._fetch: Fit | None = None
        self._links: dict[int, Link] = {}
        self._link_addresses = (ctypes.c_void_p * 0)()
        self.fleet_link_address = ctypes.addressof(self._fleet.link)
        self._backlog: dict[LegId, float] = {}
        self._backlog_s = 0.0
        self._since_s = 0.0
        self._stepped_s = float("-inf")
        self.ready_s = float("-inf")
        self.behind_s = 0.0
        self.follow()

    @property
    def knows_prefill(self) -> bool:
        """Whether any worker has computed a prompt."""
        return self._prefill is not None or self._fleet.prefill.taught

    @property
    def knows_steps(self) -> bool:
        """Whether any worker has taken a step that only decoded."""
        return self._step is not None or self._fleet.step.taught

    def prefill_s(self, uncached: int, cached: int) -> float:
        """Seconds from the first chunk to the first token: `uncached` tokens computed after `cached` ones."""
        pairs = uncached * (cached + 0.5 * uncached)
        return self.prompt_s + self.token_s * uncached + self.attention_s * pairs

    def fetching_s(self, tokens: int) -> float:
        """Seconds to bring the KV of `tokens` tokens from the node of its host."""
        return self.fetch_s + self.fetch_token_s * tokens

    def tbt_s(self, sequences: int, context_tokens: int) -> float:
        """Seconds of a decode step."""
        return self.step_s + self.sequence_s * sequences + self.context_s * context_tokens

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
        if self._prefill is None:
            self._prefill = Fit(_positive(self._fleet.prefill, _PREFILL_PRIOR))
        self._prefill.measure(features, seconds)
        self.prompt_s, self.token_s, self.attention_s = self._prefill.coefficients
        self._fleet.prefilled(features, seconds)

    def stepped(self, sequences: int, context_tokens: int, seconds: float, now_s: float) -> None:
        """A step that only decoded was taken there. Looked at a few times per second."""
        if now_s - self._stepped_s < _STEP_INTERVAL_S:
            return
        self._stepped_s = now_s
        features = (1.0, float(sequences), float(context_tokens))
        if self._step is None:
            self._step = Fit(_positive(self._fleet.step, _STEP_PRIOR))
        self._step.measure(features, seconds)
        self.step_s, self.sequence_s, self.context_s = self._step.coefficients
        self._fleet.stepped(features, seconds)

    def fetches_reported(self, before: WorkerLoad, load: WorkerLoad, block_tokens: int) -> None:
        """Learns from what its worker fetched between two reports."""
        fetches = load.pool_fetches - before.pool_fetches
        blocks = load.pool_fetched_blocks - before.pool_fetched_blocks
        if fetches > 0 and blocks > 0:
            self.fetched(fetches, blocks * block_tokens, load.pool_fetch_s - before.pool_fetch_s)

    def fetched(self, prompts: int, tokens: int, seconds: float) -> None:
        """So many tokens of so many prompts were fetched there."""
        features = (float(prompts), float(tokens))
        if self._fetch is None:
            self._fetch = Fit(_positive(self._fleet.fetch, _FETCH_PRIOR))
        self._fetch.measure(features, seconds)
        self.fetch_s, self.fetch_token_s = self._fetch.coefficients
        self._fleet.fetched(features, seconds)

    def follow(self) -> None:
        """What has not been measured here is as it is elsewhere."""
        if self._prefill is None:
            self.prompt_s, self.token_s, self.attention_s = self._fleet.prefill.coefficients
        if self._step is None:
            self.step_s, self.sequence_s, self.context_s = self._fleet.step.coefficients
        if self._fetch is None:
            self.fetch_s, self.fetch_token_s = self._fleet.fetch.coefficients

    def retire(self) -> None:
        """Its worker is gone."""
        self._fleet.dismiss(self)

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
        for fit in (self._prefill, self._step, self._fetch):
            if fit is not None:
                fit.check_integrity()
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


def _positive(learned: Fit, prior: tuple[float, ...]) -> tuple[float, ...]:
    """A prior from coefficients some of which may have been found to be nothing."""
    pairs = zip(learned.coefficients, prior, strict=True)
    return tuple(max(coefficient, 1e-3 * least) for coefficient, least in pairs)
