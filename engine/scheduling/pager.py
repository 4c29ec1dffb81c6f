"""Gives branches their pages and shares them by prefix: between the scheduler, which thinks in texts, and the arena's
reference counts, which know only pages and keys.
"""

from baton.generation import TokenSample
from baton.hashing import chain_keys, root_key
from baton.ids import BlockId, BlockKey
from baton.layout import KvLayout
from engine.cache.blocks import BlockManager
from engine.scheduling.request import Branch, Mode
from engine.scheduling.sequence import Sequence

Copy = tuple[BlockId, BlockId]


class Pager:
    """Pages of branches over one arena.

    Args:
        blocks: The arena's pages.
        layout: Their layout; part of every key.
        secret: The cluster secret, 32 bytes; keys every block.
        share_prefixes: Whether full pages are published and matched.
    """

    def __init__(
        self, blocks: BlockManager, *, layout: KvLayout, secret: bytes, share_prefixes: bool
    ) -> None:
        self.blocks = blocks
        self._block_tokens = layout.block_tokens
        self._layout = layout
        self._secret = secret
        self._share_prefixes = share_prefixes

    def hold(self, branch: Branch, *, headroom: int) -> bool:
        """Takes pages for everything `branch` has to compute, cached prefix first; False when there is no room.

        At least the last token is left to compute, because the next one is drawn from its logits; and every token where the
        logits of all are wanted.
        """
        seq = branch.seq
        matched: list[BlockId] = []
        if self._share_prefixes and branch.request.scores is None:
            num_matchable = (len(seq.tokens) - 1) // self._block_tokens
            matched = self.blocks.match(self._keys(branch, num_matchable)[:num_matchable])
        num_fresh = -(-len(seq.tokens) // self._block_tokens) - len(matched)
        taken = self.blocks.take(matched, num_fresh, headroom=headroom)
        if taken is None:
            return False
        seq.blocks = taken
        seq.num_computed = len(matched) * self._block_tokens
        branch.num_published = len(matched)
        return True

    def needs_page(self, branch: Branch) -> bool:
        """Whether the KV of the last token has no place of its own yet."""
        return branch.shares_tail or len(branch.seq.blocks) * self._block_tokens < len(
            branch.seq.tokens
        )

    def extend(self, branch: Branch, copies: list[Copy]) -> bool:
        """Gives the last token of a running branch its place, if there is room; a needed copy is added to `copies`."""
        blocks = branch.seq.blocks
        if len(blocks) * self._block_tokens < len(branch.seq.tokens):
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
        num_full = branch.seq.num_computed // self._block_tokens
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
        branch.num_published = num_full

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
        seq.num_computed = branch.num_published = branch.num_exported = 0
        branch.shares_tail = False

    def _keys(self, branch: Branch, num_full: int) -> list[BlockKey]:
        keys = branch.keys
        if len(keys) < num_full:
            scope = branch.request.prompt.cache_scope
            parent = keys[-1] if keys else root_key(self._secret, scope=scope, layout=self._layout)
            size = self._block_tokens
            tokens = branch.seq.tokens[len(keys) * size : num_full * size]
            keys += chain_keys(self._secret, parent, tokens, size)
        return keys
