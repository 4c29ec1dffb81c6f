"""Gives sequences their pages and shares them by prefix: between the scheduler, which thinks in sequences, and the
`BlockManager`'s reference counts, which know only pages and keys.
"""

from collections.abc import Iterable

from baton.hashing import chain_keys, root_key
from baton.ids import BlockId, BlockKey, LegKind
from baton.layout import KvLayout
from baton.pages import PublishedPage
from baton_engine.cache.blocks import BlockManager
from baton_engine.ports import KvSource
from baton_engine.scheduling.fetching import Fetching
from baton_engine.scheduling.request import Request, Sequence

Copy = tuple[BlockId, BlockId]

_DRAFTER_BEHIND = 64
"""Tokens, in whole pages, that a draft model computes at once where no drafts are asked of it: few enough to be found
by the next prompt of a conversation and to hold up no step, and so many that it costs next to nothing.
"""


class KvCacheManager:
    """Pages of sequences over one arena.

    Args:
        blocks: The arena's pages.
        layout: Their layout; part of every key.
        secret: The cluster secret, 32 bytes; keys every block.
        share_prefixes: Whether full pages are published and matched.
        draft_shift: By how many places a drafter's KV of a token stands before the token's own.

    Attributes:
        blocks: The arena's pages.
        story: What happened to them.
        block_tokens: Tokens per page.
        fetching: Gets blocks from a pool; None without one.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        layout: KvLayout,
        secret: bytes,
        share_prefixes: bool,
        draft_shift: int = 0,
    ) -> None:
        self.blocks = blocks
        self.story = blocks.story
        self.block_tokens = layout.block_tokens
        self._layout = layout
        self._secret = secret
        self._share_prefixes = share_prefixes
        self._has_drafter = bool(layout.drafter)
        self._draft_shift = draft_shift
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

    def allocate(self, sequence: Sequence, *, headroom: int) -> bool:
        """Takes pages for everything `sequence` has to compute, cached prefix first; False when there is no room.

        At least the last token is left to compute, because the next one is drawn from its logits; and every token where
        the logits of all are wanted. What follows the cached prefix is fetched where there is a pool and it pays; the
        pages of what waits for KV from elsewhere never are.
        """
        keys = self._usable_keys(sequence)
        matched = self.blocks.match(keys)
        num_fresh = -(-len(sequence.tokens) // self.block_tokens) - len(matched)
        taken = self.blocks.take(matched, num_fresh, headroom=headroom)
        if taken is None:
            return False
        sequence.blocks = taken
        sequence.num_published = sequence.num_external = len(matched)
        if matched:
            self.story.record("found", matched, keys=keys[: len(matched)], seq_id=sequence.seq_id)
        self.story.record("allocated", taken[len(matched) :], seq_id=sequence.seq_id)
        if self.fetching is not None and not sequence.awaits_kv:
            sequence.fetch = self.fetching.plan(sequence, keys, len(matched))
            sequence.num_external += len(sequence.fetch.keys) if sequence.fetch is not None else 0
        sequence.num_computed = sequence.num_external * self.block_tokens
        self.drafted_prompt(sequence)
        return True

    def _usable_keys(self, sequence: Sequence) -> list[BlockKey]:
        """Keys of the blocks whose KV need not be computed if it is held somewhere."""
        if not self._share_prefixes or sequence.request.scores is not None:
            return []
        num_usable = (len(sequence.tokens) - 1) // self.block_tokens
        return self._keys(sequence, num_usable)[:num_usable]

    def preempt(self, sequence: Sequence) -> None:
        """Takes all pages away from a sequence that will need them again."""
        self._release_all(sequence, "taken by a preemption")
        if self.fetching is not None:
            self.fetching.preempted(sequence, self._usable_keys(sequence))

    def settle(self, request: Request) -> None:
        """Lets the pool forget a request that is gone, or none of whose sequences waits to be admitted or fetches."""
        if self.fetching is not None:
            self.fetching.settle(request)

    def cached_tokens(self, sequence: Sequence) -> int:
        """Leading tokens of a sequence whose pages were taken just now that are held here."""
        return sequence.num_published * self.block_tokens

    def needs_slot(self, sequence: Sequence) -> bool:
        """Whether the KV of the last token has no place of its own yet."""
        held_tokens = len(sequence.blocks) * self.block_tokens
        return sequence.shares_tail or held_tokens < len(sequence.tokens)

    def append_slot(self, sequence: Sequence, copies: list[Copy]) -> bool:
        """Gives the last token of a running sequence its place, if there is room;
        a needed copy is added to `copies`.
        """
        blocks = sequence.blocks
        if len(blocks) * self.block_tokens < len(sequence.tokens):
            fresh = self.blocks.take((), 1)
            if fresh is None:
                return False
            blocks += fresh
            self.story.record("allocated", fresh, seq_id=sequence.seq_id)
        else:
            target = self.blocks.writable(blocks[-1])
            if target is None:
                return False
            if target != blocks[-1]:
                copies.append((blocks[-1], target))
                blocks[-1] = target
                self.story.record("allocated for a copy", (target,), seq_id=sequence.seq_id)
        sequence.shares_tail = False
        return True

    def append_lookahead(self, sequence: Sequence, count: int, *, headroom: int = 0) -> int:
        """Gives up to `count` tokens that are guessed behind a running sequence places, as many as there are pages for
        if `headroom` of them are to be left; returns how many. `drop_lookahead` gives back what is not needed then.
        Where the last token of the text has no place either, it comes first;
        below 0 is returned if there is no page for it.
        """
        size, length = self.block_tokens, len(sequence.tokens)
        num_fresh = -(-(length + count) // size) - len(sequence.blocks)
        num_left = max(0, self.blocks.num_available - headroom)
        fresh = self.blocks.take((), min(max(0, num_fresh), num_left))
        if fresh:
            sequence.blocks += fresh
            self.story.record("allocated for drafts", fresh, seq_id=sequence.seq_id)
        return min(count, len(sequence.blocks) * size - length)

    def drop_lookahead(self, sequence: Sequence, num_drafts: int = 0) -> None:
        """Gives back the pages that the text of a running sequence, and so many drafts behind it, do not reach."""
        num_needed = -(-(len(sequence.tokens) + num_drafts) // self.block_tokens)
        if unused := sequence.blocks[num_needed:]:
            self.story.record("freed, not reached by drafts", unused, seq_id=sequence.seq_id)
            self.blocks.release(unused)
            del sequence.blocks[num_needed:]

    def append_slots_ahead(self, sequences: Iterable[Sequence]) -> bool:
        """Gives each of those that decode a place for the token after its last one, which is being drawn;
        all or nothing.
        """
        needy = [
            sequence
            for sequence in sequences
            if len(sequence.blocks) * self.block_tokens <= len(sequence.tokens)
        ]
        fresh = self.blocks.take((), len(needy))
        if fresh is None:
            return False
        for sequence, block in zip(needy, fresh, strict=True):
            sequence.blocks.append(block)
            self.story.record("allocated", (block,), seq_id=sequence.seq_id)
        return True

    def fork(self, sequence: Sequence, sample: int, token: int) -> Sequence:
        """Another sample of the computed prompt of `sequence`: shares its pages, goes on with its own first token."""
        self.blocks.share(sequence.blocks)
        self.story.record(f"shared with sample {sample}", sequence.blocks, seq_id=sequence.seq_id)
        sequence.shares_tail = True
        constraint = sequence.constraint
        forked = Sequence(
            request=sequence.request,
            samples=(sample,),
            tokens=list(sequence.tokens),
            blocks=list(sequence.blocks),
            num_computed=sequence.num_computed,
            num_drafted=sequence.num_drafted,
            keys=list(sequence.keys),
            num_published=sequence.num_published,
            shares_tail=True,
            was_admitted=True,
            constraint=None if constraint is None else constraint.fork(),
        )
        forked.append(token)
        return forked

    def received(self, sequence: Sequence, *, but_last: bool = False) -> None:
        """The KV of all its tokens has come from another engine into its pages. With `but_last` that of the last one is
        computed anew, in a page that is its own until then.
        """
        sequence.num_computed = len(sequence.tokens) - but_last
        self.drafted_prompt(sequence)
        sequence.num_external = len(sequence.tokens) // self.block_tokens
        self.story.record("received", sequence.blocks, seq_id=sequence.seq_id)
        self.publish(sequence)

    def publish(self, sequence: Sequence) -> None:
        """Lets later prompts find the pages that `sequence` has filled by now; where there is a drafter,
        those with its KV too.

        Where another sequence was first with the same text, its page takes the place of this one's own.
        """
        num_full = sequence.num_computed // self.block_tokens
        if self._has_drafter:
            num_full = min(num_full, self._num_drafted_pages(sequence))
        if not self._share_prefixes or num_full <= sequence.num_published:
            return
        keys = self._keys(sequence, num_full)
        blocks = sequence.blocks
        for index in range(sequence.num_published, num_full):
            own, parent = blocks[index], blocks[index - 1] if index else None
            held = self.blocks.publish(keys[index], own, parent)
            if held != own:
                blocks[index] = held
                self._replaced(sequence, own)
            elif self._published is not None and index >= sequence.num_external:
                self._published.append(self._published_page(sequence, index))
        new = slice(sequence.num_published, num_full)
        self.story.record("published", blocks[new], keys=keys[new], seq_id=sequence.seq_id)
        sequence.num_published = num_full

    def drafted_prompt(self, sequence: Sequence) -> None:
        """Of all whose KV is in the pages the drafter's is too, as far as the text is known: they were computed in the
        same step, or came together.
        """
        known = len(sequence.tokens)
        sequence.num_drafted = min(sequence.num_computed + self._draft_shift, known)

    def to_draft(self, sequence: Sequence, *, up_to_end: bool) -> range:
        """The tokens of a running sequence that its drafter has not computed, and can: up to the end of the text, or as
        far as the model has come. What it would store on a published page stays undone.
        """
        known = len(sequence.tokens)
        end = known if up_to_end else min(sequence.num_computed + self._draft_shift, known)
        published = sequence.num_published * self.block_tokens
        return range(max(sequence.num_drafted, published + self._draft_shift), end)

    def _num_drafted_pages(self, sequence: Sequence) -> int:
        """Full pages that hold all of the drafter's KV that there can be yet."""
        if sequence.num_drafted == len(sequence.tokens):
            return sequence.num_computed // self.block_tokens
        return (sequence.num_drafted - self._draft_shift) // self.block_tokens

    def awaits_drafter(self, sequence: Sequence) -> bool:
        """Whether the draft model is so many full pages behind that it should catch up now: they could be published then,
        and the next draft would else compute all of a long text in one pass. Not those of beams: by then other beams
        share them.
        """
        is_beam = sequence.request.search is not None
        if not self._has_drafter or is_beam:
            return False
        size = self.block_tokens
        num_pages = sequence.num_computed // size - self._num_drafted_pages(sequence)
        return num_pages >= max(1, _DRAFTER_BEHIND // size)

    def _published_page(self, sequence: Sequence, index: int) -> PublishedPage:
        prompt, block = sequence.request.prompt, sequence.blocks[index]
        return PublishedPage(
            key=sequence.keys[index],
            block=block,
            generation=self.blocks.generation(block),
            index=index,
            scope=prompt.cache_scope,
            tenant=prompt.tenant,
        )

    def _replaced(self, sequence: Sequence, own: BlockId) -> None:
        if sequence.request.kind is LegKind.PREFILL:
            # It was exported: a transfer may read it until the hand-off is done.
            sequence.retained.append(own)
            told = "replaced by an equal page, kept for its hand-off"
        else:
            self.blocks.release((own,))
            told = "replaced by an equal page, freed"
        self.story.record(told, (own,), seq_id=sequence.seq_id)

    def free(self, sequence: Sequence) -> None:
        """Gives all pages back. The sequence keeps its tokens and keys, and may get pages again."""
        self._release_all(sequence, "freed")

    def _release_all(self, sequence: Sequence, why: str) -> None:
        if sequence.blocks or sequence.retained:
            self.story.record(why, (*sequence.blocks, *sequence.retained), seq_id=sequence.seq_id)
        self.blocks.release(sequence.blocks)
        self.blocks.release(sequence.retained)
        sequence.blocks, sequence.retained = [], []
        sequence.num_computed = sequence.num_drafted = sequence.num_published = 0
        sequence.num_external = sequence.num_exported = 0
        sequence.fetch = None
        sequence.shares_tail = False

    def _keys(self, sequence: Sequence, num_full: int) -> list[BlockKey]:
        keys = sequence.keys
        if len(keys) < num_full:
            scope = sequence.request.prompt.cache_scope
            parent = keys[-1] if keys else root_key(self._secret, scope=scope, layout=self._layout)
            size = self.block_tokens
            tokens = sequence.tokens[len(keys) * size : num_full * size]
            keys += chain_keys(self._secret, parent, tokens, size)
        return keys
