"""What a worker reports of itself, between protobuf messages and Baton's own types: its load, its blocks,
what failed.
"""

from dataclasses import fields

from baton.blocks import BlockReport
from baton.errors import BatonError, from_code
from baton.generation import WorkerLoad
from baton.rpc.v1 import common_pb2 as pb

_LOAD_FIELDS = tuple(field.name for field in fields(WorkerLoad))
"""The message's have the same names."""


def load_to_proto(load: WorkerLoad) -> pb.WorkerLoad:
    """Load report as its message."""
    return pb.WorkerLoad(**{name: getattr(load, name) for name in _LOAD_FIELDS})


def load_from_proto(message: pb.WorkerLoad) -> WorkerLoad:
    """Load report of its message."""
    return WorkerLoad(**{name: getattr(message, name) for name in _LOAD_FIELDS})


def blocks_to_proto(report: BlockReport) -> pb.BlockEvents:
    """A report on held blocks as its message."""
    return pb.BlockEvents(
        seq=report.seq,
        stored=report.stored,
        removed=report.removed,
        snapshot=report.snapshot,
        first=report.first,
        last=report.last,
    )


def blocks_from_proto(message: pb.BlockEvents) -> BlockReport:
    """Report of its message.

    Raises:
        ValueError: Its keys are cut short.
    """
    report = BlockReport(
        seq=message.seq,
        stored=message.stored,
        removed=message.removed,
        snapshot=message.snapshot,
        first=message.first,
        last=message.last,
    )
    fault = report.fault()
    if fault is not None:
        raise ValueError(f"blocks: {fault}")
    return report


def failure_to_proto(error: BatonError) -> pb.Failure:
    """An error as it crosses to another process."""
    return pb.Failure(code=error.code, message=error.message, param=error.param or "")


def failure_from_proto(message: pb.Failure) -> BatonError:
    """The error that a peer sent, rebuilt in our own tree."""
    return from_code(message.code, message.message, message.param)
