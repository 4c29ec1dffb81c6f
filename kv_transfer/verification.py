"""What a decode worker checks before it decodes from pages that others wrote: the counts at once, the bytes on a thread.

A commit of each part comes first (`fault_of`); once all parts are written, so that nobody can spoil what was found right, their
bytes are compared with the checksums that came with them (`questions`).
"""

from baton.errors import CorruptKvError, TransferError
from baton.ids import XferId
from kv_transfer.checksum import checksum_bytes
from kv_transfer.ledger_messages import VerifyPages
from kv_transfer.messages import Commit
from kv_transfer.parts import Part, Parts
from kv_transfer.plan import Grant


def fault_of(
    commit: Commit, part: Part, parts: Parts, grant: Grant, *, checksums: bool
) -> TransferError | None:
    """What is wrong with a commit beside the bytes themselves.

    Args:
        commit: What its sender says.
        part: Of every page, which the commit is about.
        parts: All of the attempt.
        grant: The pages.
        checksums: Whether a commit has to carry them.
    """
    pages = len(grant.blocks)
    wanted = (pages, pages * part.link.bytes_per_page)
    if (commit.num_blocks, commit.num_bytes) != wanted:
        return TransferError(
            f"committed {commit.num_blocks} pages and {commit.num_bytes} bytes, "
            f"granted {wanted[0]} and {wanted[1]}"
        )
    if any(other.first_tokens != commit.first_tokens for _, other in parts.commits()):
        return TransferError("two ranks of the prefill worker drew different first tokens")
    sums = checksum_bytes(part.link, commit.num_blocks)
    if checksums and pages and len(commit.checksums) != sums:
        return corrupt("checksums are missing")
    return None


def corrupt(fault: str) -> CorruptKvError:
    """The bytes are not to be decoded; `fault` says what differs."""
    return CorruptKvError(f"the pages are not what the prefill worker sent: {fault}")


def questions(xfer_id: XferId, parts: Parts, grant: Grant) -> list[VerifyPages]:
    """What has to be compared: every part with its own checksums."""
    return [
        VerifyPages(
            xfer_id=xfer_id,
            session=part.session,
            attempt=part.attempt,
            link=part.link,
            grant=grant,
            checksums=commit.checksums,
        )
        for part, commit in parts.commits()
    ]
