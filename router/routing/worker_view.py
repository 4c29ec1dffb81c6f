"""One connected worker as this router sees it: what it reported, and what the router itself has in flight there.

The router's own counts lead, because a report is always older than the last decision. Reports only add what they show
beyond them: the work of other routers.
"""

import ctypes
from dataclasses import dataclass, field, replace

from baton.generation import WorkerLoad
from baton.ids import Role, WorkerIdentity
from baton.rpc.hello import WorkerHello
from router.breaker import Breaker
from router.routing.forecast import Forecast
from router.routing.numbers import WorkerNumbers
from router.routing.pools import NO_SLOT


@dataclass(eq=False)
class WorkerView(WorkerNumbers):
    """One connected worker. The dispatcher's legs count up and down on it.

    The numbers that decisions read lie in a record (`router.routing.numbers`) and begin at 0.

    Attributes:
        hello: What it said of itself.
        address: Where it was reached.
        slot: Its place in the prefix index.
        pool_slot: That of the pool node from which it can fetch; below 0 without one.
        layout_group: Equal exactly for workers with equal layouts; pairs are made within a group.
        load: Its last report.
        leaving: Those of its view that take nothing new; whoever drains enters itself.
        legs: Legs of this router on it.
        prefill_tokens: Prompt tokens this router sent whose KV is not computed yet.
        decode_sequences: Samples this router decodes there.
        decode_tokens: Tokens of context of those samples.
        prefills: Prompts of this router whose KV is not computed yet.
        tbt_targets: How many of its legs that decode there were promised which time between tokens.
        foreign_prefill_tokens: Pending prompt tokens that are not this router's, by the last report.
        foreign_sequences: The same for sequences.
        progress_s: When it last showed progress, or when it last became busy.
        heard_s: When it last said anything; a worker that is well reports twice per second.
        breaker: Whether its legs fail so often that it is left out for a while.
        last_pick: Number of the last decision that chose it.
        forecast: What it will take for its work.
        used_tokens: Room taken by KV that is in use there, by the last report.
        reported_context_tokens: Tokens of context that its last decode step read.
        can_prefill: Whether it computes prompts for others. This and what follows comes from its greeting.
        can_decode: Whether it draws tokens.
        takes_kv: Whether others can hand KV over to it.
        capacity_tokens: Tokens whose KV it has room for.
        max_sequences: Sequences that it runs at once.
        kv_token_bytes: Bytes of KV per token.
    """

    hello: WorkerHello
    address: str
    slot: int = field()  # in the record
    layout_group: int
    progress_s: float = field()  # in the record
    heard_s: float = field()  # in the record
    load: WorkerLoad = field(default_factory=WorkerLoad)
    breaker: Breaker = field(default_factory=Breaker)
    prefill_tokens: int = 0
    prefills: int = 0
    tbt_targets: dict[float, int] = field(default_factory=dict)
    leaving: set["WorkerView"] = field(default_factory=set)
    last_pick: int = 0
    forecast: Forecast = field(default_factory=Forecast)
    can_decode: bool = field(init=False)
    takes_kv: bool = field(init=False)

    def __post_init__(self) -> None:
        hello, layout = self.hello, self.hello.layout
        self.take_role(hello.role)
        self.capacity_tokens = hello.num_blocks * layout.block_tokens
        self.max_sequences = hello.max_num_seqs
        self.pool_slot = NO_SLOT
        self.kv_token_bytes = layout.page_bytes / layout.block_tokens
        self.forecast_address = ctypes.addressof(self.forecast)

    def take_role(self, role: Role) -> None:
        """It takes the legs of `role` from now on."""
        self.hello = replace(self.hello, role=role)
        self.can_prefill = role.prefills_for_others
        self.can_decode = role.decodes
        self.takes_kv = self.can_decode and bool(self.hello.transfer_address)

    @property
    def identity(self) -> WorkerIdentity:
        """Name and incarnation."""
        return self.hello.identity

    @property
    def draining(self) -> bool:
        """Whether it takes nothing new."""
        return self in self.leaving

    @draining.setter
    def draining(self, draining: bool) -> None:
        if draining:
            self.leaving.add(self)
        else:
            self.leaving.discard(self)

    @property
    def kind(self) -> tuple[Role, int]:
        """What another worker must be like to do the same."""
        return self.hello.role, self.layout_group

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens that stand before a new prompt."""
        return self.prefill_tokens + self.foreign_prefill_tokens

    @property
    def sequences(self) -> int:
        """Sequences a new one would share steps with."""
        return self.decode_sequences + self.foreign_sequences

    @property
    def tightest_tbt_s(self) -> float | None:
        """The shortest time between tokens that anybody who decodes there was promised."""
        return min(self.tbt_targets, default=None)

    def report(self, load: WorkerLoad, now_s: float) -> None:
        """Takes a load report: corrects what is not this router's own."""
        self.heard_s = now_s
        if load.steps != self.load.steps:
            self.progress_s = now_s
            if load.step_s > 0.0:
                sequences, context = load.step_sequences, load.step_context_tokens
                self.forecast.stepped(sequences, context, load.step_s, now_s)
        self.forecast.fetches_reported(self.load, load, self.hello.layout.block_tokens)
        self.used_tokens = load.blocks_used * self.hello.layout.block_tokens
        self.reported_context_tokens = load.step_context_tokens if load.running else 0
        self.load = load
        self.draining = load.draining
        # A leg is one sequence to the worker until its samples fork.
        own = max(self.legs, self.decode_sequences)
        self.foreign_prefill_tokens = max(0, load.prefill_tokens_pending - self.prefill_tokens)
        self.foreign_sequences = max(0, load.running + load.waiting - own)

    def stalled(self, now_s: float, timeout_s: float) -> bool:
        """Whether it holds work of this router and has shown no progress for `timeout_s`."""
        return self.legs > 0 and now_s - self.progress_s > timeout_s

    def silent(self, now_s: float, timeout_s: float) -> bool:
        """Whether nothing came from it for `timeout_s`: it stands still, or the way to it is cut."""
        return now_s - self.heard_s > timeout_s
