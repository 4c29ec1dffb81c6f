"""Gives branches their pages and shares them by prefix: between the scheduler, which thinks in texts, and the arena's
reference counts, which know only pages and keys.
"""

from collections.abc import Iterable

from baton.generation import TokenSample
from baton.hashing import chain_keys, root_key
from baton.ids import BlockId, BlockKey
from baton.layout import KvLayout
from baton.pages import PublishedPage
from baton_engine.cache.blocks import BlockManager
from baton_engine.ports import KvSource
from baton_engine.scheduling.fetching import Fetching
from baton_engine.scheduling.request import Branch, Mode, Request
from baton_engine.scheduling.sequence import Sequence

Copy = tuple[BlockId, BlockId]


class Pager:
    """Pages of branches over one arena.

    Args:
        blocks: The arena's pages.
        layout: Their layout; part of every key.
        secret: The cluster secret, 32 bytes; keys every block.
        share_prefixes: Whether full pages are published and matched.

    Attributes:
        blocks: The arena's pages.
        block_tokens: Tokens per page.
        fetching: Gets blocks from a pool; None without one.
    """

    def __init__(
        self, blocks: BlockManager, *, layout: KvLayout, secret: bytes, share_prefixes: bool
    ) -> None:
        self.blocks = blocks
        self.block_tokens = layout.block_tokens
        self._layout = layout
        self._secret = secret
        self._share_prefixes = share_prefixes
        self._published: list[PublishedPage] | None = None
        self.fetching: Fetching | None = None

    def fetch_from(self, source: KvSource) -> None:
        """What is not held here is fetched from `source` where that is quicker than computing it."""
        if self._share_prefixes:
            self.fetching = Fetching(source, self.block_tokens)

    def note_published(self) -> None:
        """From now on remembers which pages are published, for `take_published`."""
        if self._share_prefixes:
            self._published = []

    def take_published(self) -> list[PublishedPage]:
        """Pages that were computed here and published since the last call."""
        if not self._published:
            return []
        taken, self._published = self._published, []
        return taken

    def hold(self, branch: Branch, *, headroom: int) -> bool:
        """Takes pages for everything `branch` has to compute, cached prefix first; False when there is no room.

        At least the last token is left to compute, because the next one is drawn from its logits; and every token where the
        logits of all are wanted. What follows the cached prefix is fetched where there is a pool and it pays; the pages of
        what waits for KV from elsewhere never are.
        """
        seq = branch.seq
        keys = self._usable_keys(branch)
        matched = self.blocks.match(keys)
        num_fresh = -(-len(seq.tokens) // self.block_tokens) - len(matched)
        taken = self.blocks.take(matched, num_fresh, headroom=headroom)
        if taken is None:
            return False
        seq.blocks = taken
        branch.num_published = branch.num_brought = len(matched)
        if self.fetching is not None and not branch.awaits_kv:
            branch.fetch = self.fetching.plan(branch, keys, len(matched))
            branch.num_brought += len(branch.fetch.keys) if branch.fetch is not None else 0
        seq.num_computed = branch.num_brought * self.block_tokens
        return True

    def _usable_keys(self, branch: Branch) -> list[BlockKey]:
        """Keys of the blocks whose KV need not be computed if it is somewhere."""
        if not self._share_prefixes or branch.request.scores is not None:
            return []
        num_usable = (len(branch.seq.tokens) - 1) // self.block_tokens
        return self._keys(branch, num_usable)[:num_usable]

    def give_up(self, branch: Branch) -> None:
        """Takes all pages away from a branch that will come back for them."""
        self.release(branch)
        if self.fetching is not None:
            self.fetching.gave_up(branch, self._usable_keys(branch))

    def settle(self, request: Request) -> None:
        """Lets the pool forget a request of which nothing waits to be admitted, or that is gone."""
        if self.fetching is not None:
            self.fetching.settle(request)

    def cached_tokens(self, branch: Branch) -> int:
        """Leading tokens of a branch whose pages were taken just now that are held here."""
        return branch.num_published * self.block_tokens

    def needs_page(self, branch: Branch) -> bool:
        """Whether the KV of the last token has no place of its own yet."""
        return branch.shares_tail or len(branch.seq.blocks) * self.block_tokens < len(
            branch.seq.tokens
        )

    def extend(self, branch: Branch, copies: list[Copy]) -> bool:
        """Gives the last token of a running branch its place, if there is room; a needed copy is added to `copies`."""
        blocks = branch.seq.blocks
        if len(blocks) * self.block_tokens < len(branch.seq.tokens):
            fresh = self.blocks.take((), 1)
            if fresh is None:
                return False
            blocks += fresh
        else:
            target = self.blocks.writable(blocks[-1])
            if target is None:
                return False
            if target != blocks[-1]:
                copies.append((blocks[-1], target))
                blocks[-1] = target
        branch.shares_tail = False
        return True

    def extend_unseen(self, branches: Iterable[Branch]) -> bool:
        """Gives each of those that decode a place for the token after its last one, which is being drawn; all or nothing."""
        needy = [
            branch.seq.blocks
            for branch in branches
            if len(branch.seq.blocks) * self.block_tokens <= len(branch.seq.tokens)
        ]
        fresh = self.blocks.take((), len(needy))
        if fresh is None:
            return False
        for blocks, block in zip(needy, fresh, strict=True):
            blocks.append(block)
        return True

    def fork(self, branch: Branch, first: TokenSample) -> Branch:
        """Another sample of the computed prompt of `branch`: shares its pages, goes on with its own first token."""
        seq = branch.seq
        forked = Sequence(
            seq_id=seq.seq_id,
            sample=first.sample,
            params=seq.params,
            tokens=[*seq.tokens, first.token],
            prompt_len=seq.prompt_len,
            blocks=list(seq.blocks),
            num_computed=seq.num_computed,
        )
        self.blocks.share(seq.blocks)
        branch.shares_tail = True
        return Branch(
            request=branch.request,
            seq=forked,
            samples=(first.sample,),
            keys=list(branch.keys),
            num_published=branch.num_published,
            shares_tail=True,
            was_admitted=True,
        )

    def publish(self, branch: Branch) -> None:
        """Lets later prompts find the pages that `branch` has filled by now.

        Where another branch was first with the same text, its page takes the place of the branch's own.
        """
        num_full = branch.seq.num_computed // self.block_tokens
        if not self._share_prefixes or num_full <= branch.num_published:
            return
        keys = self._keys(branch, num_full)
        blocks = branch.seq.blocks
        for index in range(branch.num_published, num_full):
            own, parent = blocks[index], blocks[index - 1] if index else None
            held = self.blocks.publish(keys[index], own, parent)
            if held != own:
                blocks[index] = held
                self._put_away(branch, own)
            elif self._published is not None and index >= branch.num_brought:
                self._published.append(self._published_page(branch, index))
        branch.num_published = num_full

    def _published_page(self, branch: Branch, index: int) -> PublishedPage:
        prompt, block = branch.request.prompt, branch.seq.blocks[index]
        return PublishedPage(
            key=branch.keys[index],
            block=block,
            generation=self.blocks.generation(block),
            index=index,
            scope=prompt.cache_scope,
            tenant=prompt.tenant,
        )

    def _put_away(self, branch: Branch, own: BlockId) -> None:
        if branch.request.mode is Mode.PREFILL:
            branch.parked.append(
                own
            )  # it was exported: a transfer may read it until the hand-over is done
        else:
            self.blocks.release((own,))

    def release(self, branch: Branch) -> None:
        """Gives all pages back. The branch keeps its tokens and keys, and may be held again."""
        seq = branch.seq
        self.blocks.release(seq.blocks)
        self.blocks.release(branch.parked)
        seq.blocks, branch.parked = [], []
        seq.num_computed = branch.num_published = branch.num_brought = branch.num_exported = 0
        branch.fetch = None
        branch.shares_tail = False

    def _keys(self, branch: Branch, num_full: int) -> list[BlockKey]:
        keys = branch.keys
        if len(keys) < num_full:
            scope = branch.request.prompt.cache_scope
            parent = keys[-1] if keys else root_key(self._secret, scope=scope, layout=self._layout)
            size = self.block_tokens
            tokens = branch.seq.tokens[len(keys) * size : num_full * size]
            keys += chain_keys(self._secret, parent, tokens, size)
        return keys
