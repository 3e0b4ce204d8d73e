"""EXECUTE: the requests of a batch."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from halimede.core.types import Buffer
from halimede.inference_frames.requests import describe_request, encode_requests, read_requests
from halimede.inference_frames.tensors import Locate, Store
from halimede.workers.frames.kinds import EXECUTE
from halimede.workers.worker import BatchItem

_BATCH = struct.Struct("<Q")
_ANY_BYTES = 0xFFFFFFFF
"""Texts of clients are as long as the protocols of the clients allow."""


def encode_execute(batch: int, items: Sequence[BatchItem], store: Store, kind: int = EXECUTE) -> Buffer:
    """A frame of this kind, EXECUTE or one of EXECUTE_NEXT."""
    described = [
        (each.key, each.rows, each.sequence_slot, describe_request(each.request, store, _ANY_BYTES)) for each in items
    ]
    return encode_requests(kind, batch, described)


@dataclass(slots=True)
class ExecuteFrame:
    """A batch for a worker to execute."""

    batch: int
    items: list[BatchItem]


def batch_number(body: memoryview) -> int:
    """The number of the batch of an EXECUTE or EXECUTE_NEXT frame."""
    number: int = _BATCH.unpack_from(body)[0]
    return number


def decode_execute(body: memoryview, all_outputs: int, locate: Locate) -> ExecuteFrame:
    """Decode the body of an EXECUTE frame in the worker, without checks. Tensors are views of `body`.

    `all_outputs` is how many outputs the model has. Requests that name them all name none.
    """
    items = []
    for key, rows, sequence_slot, request in read_requests(body, locate, _ANY_BYTES, all_outputs):
        items.append(BatchItem(key, request, rows, False, sequence_slot=sequence_slot))
    (batch,) = _BATCH.unpack_from(body)
    return ExecuteFrame(batch, items)
