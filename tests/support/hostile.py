"""Frames of a worker that breaks the rules of the channel."""

import os
import re
from collections.abc import Callable

from halimede.backends.service_calls import (
    ServiceCall,
    ServiceResult,
)
from halimede.channel.frames import HEADER
from halimede.core.types import Buffer, InferenceRequest
from halimede.inference_frames.calls import encode_infer
from halimede.inference_frames.kinds import CALL, TAKEN, InferenceFrame
from halimede.workers.frames.kinds import WorkerFrame
from halimede.workers.frames.services import encode_service_call
from support.channel import Stage, item, tensor

KIB, MIB = 1 << 10, 1 << 20
LONGEST_TURN_S = 0.25
"""Limit of the loop's processor time. The goal is 50 ms; the margin is for other tests on the machine."""


def raw(kind: int, body: bytes = b"", length: int | None = None) -> bytes:
    return HEADER.pack(len(body) if length is None else length, kind) + body


def service(call: ServiceCall[ServiceResult], change: Callable[[bytes], bytes] = bytes) -> bytes:
    """A service call with a modified body."""
    return raw(WorkerFrame.SERVICE_CALL, change(CALL.pack(1) + encode_service_call(call)))


def infer(
    number: int, *sizes: int, store: Callable[[Buffer], tuple[int, int] | None] = lambda _: None, wanted: int = 0
) -> bytes:
    """A worker's request for an inference of another model."""
    request = InferenceRequest("other", inputs=[tensor(f"x{at}", size) for at, size in enumerate(sizes)])
    return bytes(encode_infer(number, 0, request, store, lambda: wanted))


def taken(number: int, count: int) -> bytes:
    return raw(InferenceFrame.TAKEN, TAKEN.pack(number, count))


def uncalled(number: int) -> bytes:
    return raw(InferenceFrame.CANCEL_CALL, CALL.pack(number))


def deep_json(start: bytes) -> bytes:
    return start + b"[" * 1_000_000


def check_reason(reason: str, pattern: str) -> None:
    assert reason.startswith("it sent garbage: "), reason
    assert re.search(pattern, reason), reason
    assert len(reason) < 400
    assert reason.isprintable()


def send(each: Stage, stream: bytes) -> None:
    """Send as fast as the server reads, on a thread, so that the loop does only the server's work."""
    worker_end = os.dup(each.worker_end.fileno())
    at = 0
    try:
        os.set_blocking(worker_end, True)
        while at < len(stream):
            at += os.write(worker_end, stream[at : at + MIB])
    except OSError:
        pass  # the server has closed its end
    finally:
        os.close(worker_end)


async def executed(each: Stage, *sizes: int) -> int:
    each.connection.batches.execute([item(1, *sizes)], 0)
    return (await each.receive_batch()).batch
