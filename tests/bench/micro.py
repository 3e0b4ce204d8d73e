"""Parts of the hot path, each timed alone, in microseconds per request."""

import timeit
from collections.abc import Callable

import models
import numpy as np
from hpack import Encoder

from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput
from halimede.core.config.model_view import ModelView
from halimede.core.schedule.actions import Execute, Slot
from halimede.core.schedule.dynamic_batcher import DynamicBatchScheduler
from halimede.core.schedule.policy import BatchPolicy, Priorities
from halimede.core.schedule.queue import BatchQueue
from halimede.core.schedule.scheduler import Pending
from halimede.core.schedule.sequences.policy import SequencePolicy, oldest_policy
from halimede.core.schedule.sequences.scheduler import SequenceScheduler
from halimede.core.types import DataType, InferenceResponse, Tensor
from halimede.core.wire import grpc_call, grpc_messages, grpc_response
from halimede.core.wire.grpc_reader import InferReader
from halimede.core.wire.http2 import frames
from halimede.core.wire.http2.codes import END_HEADERS, END_STREAM, FrameType, H2Code
from halimede.core.wire.http2.connection import Http2Connection
from halimede.core.wire.http2.events import DataArrives, RequestBegins
from halimede.core.wire.http2.limits import Http2Limits
from halimede.core.wire.http_request import InferDecoder, decode_infer
from halimede.core.wire.http_response import encode_infer
from halimede.core.wire.protocol import ModelInferRequest

BATCH = 16
QUEUED = 1000
SEQUENCES = 1000
REPEATS = 5
CALL_FIELDS = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/inference.GRPCInferenceService/ModelInfer"),
    (":authority", "localhost:8001"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
    ("user-agent", "grpc-python/1.85.1 grpc-c/53.0.0 (linux; chttp2)"),
    ("grpc-accept-encoding", "identity, deflate, gzip"),
)


def us_per_request(step: Callable[[], None], requests_per_step: int) -> list[float]:
    timer = timeit.Timer(step)
    steps, _ = timer.autorange()  # as many as take 0.2 s
    return [taken / steps / requests_per_step * 1e6 for taken in timer.repeat(REPEATS, steps)]


def scheduler_us() -> list[float]:
    """Enqueue BATCH requests while the instance is busy, complete it, poll: one batch of all of them."""
    scheduler = DynamicBatchScheduler(BatchPolicy(max_batch_size=BATCH), instances=1)
    # A first batch keeps the instance busy.
    scheduler.enqueue(Pending(key=-1, batch_size=1, size_bytes=64), 0)
    scheduler.poll(0)
    now_ns = 0

    def step() -> None:
        nonlocal now_ns
        for key in range(now_ns, now_ns + BATCH):
            scheduler.enqueue(Pending(key=key, batch_size=1, size_bytes=64), now_ns)
            scheduler.poll(now_ns)
        scheduler.completed(Slot(0), 1_000_000)
        actions = scheduler.poll(now_ns)
        if not (len(actions) == 1 and isinstance(actions[0], Execute) and len(actions[0].requests) == BATCH):
            raise RuntimeError(f"expected one batch of {BATCH}, got {actions}")
        now_ns += BATCH

    return us_per_request(step, BATCH)


def queue_us(levels: int, *, has_timeouts: bool = False) -> list[float]:
    """As `scheduler_us`, with QUEUED requests in the queue, in turns over the levels."""
    policy = BatchPolicy(max_batch_size=BATCH, default_timeout_ns=(1 << 62) if has_timeouts else 0)
    queue = BatchQueue(policy, priorities=Priorities(levels, levels)) if levels > 1 else None
    scheduler = DynamicBatchScheduler(policy, 1, queue)
    scheduler.enqueue(Pending(key=-1, batch_size=1, size_bytes=64), 0)
    scheduler.poll(0)
    last = QUEUED
    for key in range(last):
        scheduler.enqueue(Pending(key=key, batch_size=1, size_bytes=64, priority=1 + key % levels), key)

    def step() -> None:
        nonlocal last
        for key in range(last, last + BATCH):
            scheduler.enqueue(Pending(key=key, batch_size=1, size_bytes=64, priority=1 + key % levels), key)
            scheduler.poll(key)
        last += BATCH
        scheduler.completed(Slot(0), 1_000_000)
        actions = scheduler.poll(last)
        if not (len(actions) == 1 and isinstance(actions[0], Execute) and scheduler.queued == QUEUED):
            raise RuntimeError(f"expected one batch of {BATCH}, got {actions}")

    return us_per_request(step, BATCH)


def sequences_us() -> list[float]:
    """One request of each of BATCH sequences of 1,000 that are open, in the oldest strategy: enqueue, poll, complete."""
    policy = SequencePolicy("m", BATCH, sequence_slots=SEQUENCES, strategy=oldest_policy(BATCH))
    scheduler = SequenceScheduler(policy, instances=1)
    now_ns = key = 0

    def send(*, start: bool) -> None:
        nonlocal now_ns, key
        for _ in range(BATCH):
            key += 1
            scheduler.enqueue(Pending(key, 1, 64, correlation=key % SEQUENCES + 1, sequence_start=start), now_ns)
            scheduler.poll(now_ns)
        # The first request ran alone, the others follow together.
        for _ in range(2):
            now_ns += 1
            scheduler.completed(Slot(0), 1_000_000)
            scheduler.poll(now_ns)
        if scheduler.queued:
            raise RuntimeError(f"expected two batches, {scheduler.queued} requests are queued")

    for _ in range(-(-SEQUENCES // BATCH)):
        send(start=True)
    scheduler.poll(now_ns)
    return us_per_request(lambda: send(start=False), BATCH)


def wire_http_us(*, is_known: bool) -> list[float]:
    """Decode a binary request of FP32[16] and encode the same tensor as its answer.

    `is_known`: the decoder has cached the JSON part from an earlier request; otherwise it parses a new one.
    """
    config = ModelConfig(
        name="ident",
        max_batch_size=32,
        input=(ModelInput("INPUT0", DataType.FP32, dims=(16,)),),
        output=(ModelOutput("OUTPUT0", DataType.FP32, dims=(16,)),),
    )
    view = ModelView("ident", "1", ("1",), config, labels={})
    body, header_length = models.binary_request("INPUT0", np.arange(16, dtype=np.float32).reshape(1, 16))

    decoder = InferDecoder(view, "")

    def step() -> None:
        decoded = decoder.decode(body, header_length) if is_known else decode_infer(view, body, header_length)
        tensor = decoded.request.inputs[0]
        output = Tensor("OUTPUT0", tensor.datatype, tensor.shape, tensor.data)
        encode_infer(InferenceResponse("ident", "1", outputs=[output]), decoded.destinations, view)

    return us_per_request(step, 1)


def wire_grpc_us() -> list[float]:
    """Parse and decode a ModelInferRequest of FP32[16], encode and serialize the same tensor as its answer."""
    view = ModelView("ident", "1", ("1",), ModelConfig(name="ident", max_batch_size=32), labels={})
    message = ModelInferRequest(model_name="ident", raw_input_contents=[bytes(64)])
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 16])
    raw = message.SerializeToString()
    reader = InferReader()

    def step() -> None:
        call = reader.read(raw).decode()
        tensor = call.request.inputs[0]
        output = Tensor("OUTPUT0", tensor.datatype, tensor.shape, tensor.data)
        response = InferenceResponse("ident", "1", outputs=[output])
        grpc_response.encode_infer(response, view, call.destinations)

    return us_per_request(step, 1)


def wire_http2_us() -> list[float]:
    """As `wire_grpc_us`, from the frames of a call, which a client of grpc repeats, to the frames of its answer."""
    view = ModelView("ident", "1", ("1",), ModelConfig(name="ident", max_batch_size=32), labels={})
    message = ModelInferRequest(model_name="ident", raw_input_contents=[bytes(64)])
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 16])
    content = message.SerializeToString()
    data = grpc_messages.pack_prefix(False, len(content)) + content
    client = Encoder()
    client.encode(CALL_FIELDS)
    block = client.encode(CALL_FIELDS)  # Now all fields are in the dynamic table.
    connection: Http2Connection[grpc_call.CallHead, None] = Http2Connection(grpc_call.read_head, Http2Limits(), 0.0)
    hello = frames.PREFACE + frames.settings({}) + frames.window_update(0, 1 << 30)
    connection.receive(memoryview(hello + _call(1, Encoder().encode(CALL_FIELDS), data)), 0.0)
    connection.out.reset(connection.table.open[1], H2Code.CANCEL)
    reader = InferReader()
    number = 1

    def step() -> None:
        nonlocal number
        number += 2
        events = connection.receive(memoryview(_call(number, block, data)), 0.0)
        begins, arrives = events
        if not (isinstance(begins, RequestBegins) and isinstance(arrives, DataArrives)):
            raise RuntimeError(f"expected a request and its data, got {events}")
        call = reader.read(bytes(arrives.data[grpc_messages.PREFIX_BYTES :])).decode()
        tensor = call.request.inputs[0]
        response = InferenceResponse(
            "ident", "1", outputs=[Tensor("OUTPUT0", tensor.datatype, tensor.shape, tensor.data)]
        )
        parts = grpc_response.encode_infer(response, view, call.destinations)
        size = sum(map(len, parts))
        framed = (grpc_messages.pack_prefix(False, size), *parts)
        size += grpc_messages.PREFIX_BYTES
        connection.out.answer(begins.stream, grpc_call.opening(), framed, size, grpc_call.OK_TRAILERS)
        # The window that the client gives back.
        connection.out.widen(size)
        b"".join(connection.out.take())

    return us_per_request(step, 1)


def _call(number: int, block: bytes, data: bytes) -> bytes:
    return frames.frame(FrameType.HEADERS, END_HEADERS, number, block) + frames.frame(
        FrameType.DATA, END_STREAM, number, data
    )
