"""What an operator chooses of how an engine schedules."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingPolicy:
    """The choices; `baton.config.schema.EngineConfig` says what they mean to users.

    Attributes:
        tbt_s: Time between tokens that is kept for decodes without a promise of their own while prompts are computed beside
            them; None for no bound.
        prefill_order: One of `order.ORDERS`.
        preemption: One of `precedence.PRECEDENCES`.
        output_headroom: Share of the pages that everybody's output may still take for which there must be room when another
            is let in. At 1 nobody who asks for a single sample is ever preempted.
    """

    tbt_s: float | None = None
    prefill_order: str = "slack"
    preemption: str = "arrival"
    output_headroom: float = 0.0
