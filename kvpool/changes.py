"""What a node has yet to tell the directory: net changes of what it holds, and where."""

from collections.abc import Callable
from itertools import islice

from baton.ids import BlockKey
from kvpool.messages import DirectoryChanges, Stored


class ReplicaLog:
    """Keys whose entry in the directory is out of date. What came and went again unseen leaves no trace, so that the log is
    never longer than twice what the node holds, however long the directory is away.
    """

    def __init__(self) -> None:
        self._known: dict[BlockKey, bool] = {}  # whether the directory has an entry of it

    def __len__(self) -> int:
        return len(self._known)

    def stored(self, key: BlockKey) -> None:
        """The node holds `key`, which it did not."""
        self._known.setdefault(key, False)

    def moved(self, key: BlockKey) -> None:
        """The node holds `key` in another place."""
        self._known.setdefault(key, True)

    def removed(self, key: BlockKey) -> None:
        """The node holds `key` no longer."""
        if self._known.setdefault(key, True) is False:
            del self._known[key]

    def take(self, find: Callable[[BlockKey], Stored | None], limit: int) -> DirectoryChanges:
        """Takes the oldest changes, at most `limit` of them; `find` says where a block is now."""
        keys = list(islice(self._known, limit))
        found = [(key, find(key)) for key in keys]
        for key in keys:
            del self._known[key]
        return DirectoryChanges(
            stored=tuple(stored for _, stored in found if stored is not None),
            removed=tuple(key for key, stored in found if stored is None),
        )
