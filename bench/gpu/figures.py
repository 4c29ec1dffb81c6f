"""The figures of a benchmark on a GPU, point by point: each is kept for good the moment it is known,
so that what a later point breaks is not lost.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.harness.report import Report

Keep = Callable[[dict[str, float]], None]


@dataclass(slots=True)
class Figures:
    """Takes figures, and counts the points that broke off.

    Attributes:
        keep: Keeps figures for good.
        counted_as: The figure that says how many points broke off, once one has.
        failed: Points that broke off.
    """

    keep: Keep
    counted_as: str = "failed"
    failed: int = 0

    def add(self, **figures: float) -> None:
        """Notes figures for good."""
        self.keep(figures)
        print("  ".join(f"{name} {value:.4g}" for name, value in figures.items()), flush=True)

    @contextmanager
    def point(self, name: str) -> Iterator[None]:
        """One thing to find out: if it breaks off, the next one is tried all the same."""
        begin_s = time.perf_counter()
        try:
            yield
        except Exception:  # noqa: BLE001 - whatever it was, the other points have not been tried yet
            self.failed += 1
            print(f"{name} broke off:", flush=True)
            traceback.print_exc(file=sys.stdout)
            self.add(**{self.counted_as: float(self.failed)})
        print(f"    {name}: {time.perf_counter() - begin_s:.1f} s", flush=True)


def appended_to(file: Path) -> Keep:
    """Keeps figures as lines of JSON."""

    def keep(figures: dict[str, float]) -> None:
        with file.open("a") as lines:
            lines.write(json.dumps(figures) + "\n")

    return keep


def written_to(report: Report, file: Path | None) -> Keep:
    """Keeps figures in the report, which is written each time where there is a file.
    Where it cannot be written, that is said: the next figures are worth finding all the same.
    """

    def keep(figures: dict[str, float]) -> None:
        report.figures |= figures
        try:
            if file is not None:
                report.write(file)
        except OSError as error:
            print(f"the report cannot be written: {error}", flush=True)

    return keep
