"""Discovery in memory: names what a test says."""

from dataclasses import dataclass, field

from router.discovery.ports import Look


@dataclass(slots=True, eq=False)
class FakeDiscovery:
    """Answers every look with `found`.

    Attributes:
        found: See above.
        period_s: Between two looks.
        looks: How many there were.
    """

    found: Look = field(default_factory=Look)
    period_s: float = 0.01
    looks: int = 0

    async def look(self) -> Look:
        """What the test said last."""
        self.looks += 1
        return self.found
