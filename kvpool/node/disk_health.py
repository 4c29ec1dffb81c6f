"""Whether a disk is to be written to: one that keeps failing is left alone for a while, and read all the same."""

_FAILURES = 3
_REST_S = 30.0


class DiskHealth:
    """Counts writes that failed in a row.

    Args:
        present: Whether there is a disk.
    """

    def __init__(self, *, present: bool) -> None:
        self._present = present
        self._failures = 0
        self._rests_until_s = 0.0

    @property
    def works(self) -> bool:
        """Whether there is a disk, and writing to it did not keep failing."""
        return self._present and self._failures < _FAILURES

    def usable(self, now_s: float) -> bool:
        """Whether blocks may be moved there."""
        if self._failures >= _FAILURES and now_s < self._rests_until_s:
            return False
        return self._present

    def wrote(self) -> None:
        """A write has succeeded."""
        self._failures = 0

    def failed(self, now_s: float) -> None:
        """A write has failed: a fault of the device, or no space left."""
        self._failures += 1
        self._rests_until_s = now_s + _REST_S
