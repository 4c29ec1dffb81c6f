"""What the launcher needs from whoever runs it."""

from typing import Protocol

from baton_cluster.events import Announcement, ChildProgress


class Observer(Protocol):
    """Told what happens, to show it. Must not block."""

    def progress(self, event: ChildProgress) -> None:
        """A child gets on with its start."""

    def announce(self, announcement: Announcement) -> None:
        """Something that an operator wants to read."""


class Unobserved:
    """An observer for those who only want the cluster."""

    def progress(self, event: ChildProgress) -> None:
        """Nothing."""

    def announce(self, announcement: Announcement) -> None:
        """Nothing."""
