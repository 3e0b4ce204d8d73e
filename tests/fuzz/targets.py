"""Fuzz targets: one function per decoder. It takes bytes and returns nothing; an exception is a finding.

Targets are deterministic and fast, so that the same function runs in the fuzzer (`make fuzz`) and, in every test run, over
the corpus of findings.
"""

import asyncio
import re
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, cast

from fuzz.asks_target import asks
from fuzz.http2_target import http2_frames
from fuzz.model_file_target import model_file
from halimede.backends.hosting import Answer, Reply, WorkerSpec
from halimede.backends.service_calls import ServiceCall, ServiceResult
from halimede.backends.tensorflow.model_file import parse_frozen_graph, parse_saved_model
from halimede.core.config.check_request import RequestChecker
from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput
from halimede.core.config.model_view import ModelView
from halimede.core.config.read import ParsedConfig, read_json, read_pbtxt, read_yaml
from halimede.core.config.write import to_json
from halimede.core.schedule.batching import check_reply
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest, InferenceResponse, Tensor
from halimede.core.wire import generate, http_request
from halimede.core.wire.grpc_request import read_infer
from halimede.core.wire.steps import run
from halimede.frontends.http.exchange import Exchange
from halimede.frontends.http.framing import Limits
from halimede.frontends.http.listener import Listener
from halimede.frontends.http.protocol import HttpConnection
from halimede.frontends.port import PortLimits
from halimede.inference_frames.calls import Infer
from halimede.workers.connection.batches import SentBatch
from halimede.workers.connection.worker_connection import Owners
from halimede.workers.connection.worker_connection import WorkerConnection as Channel
from halimede.workers.frames.answers import Done, Response
from halimede.workers.states import HeldStates
from halimede.workers.worker import BatchItem

CLIENT_FAULTS = {ErrorCode.INVALID_ARG, ErrorCode.UNSUPPORTED}
LONGEST_ERROR = 8 << 10

NAMES = {
    "x": DataType.FP32,
    "i": DataType.INT8,
    "u": DataType.UINT64,
    "b": DataType.BOOL,
    "s": DataType.BYTES,
    "h": DataType.FP16,
}
CONFIG = ModelConfig(
    name="m",
    max_batch_size=4,
    input=tuple(ModelInput(name, datatype, dims=(-1,), optional=True) for name, datatype in NAMES.items()),
    output=(ModelOutput("y", DataType.FP32, dims=(-1,)),),
)
VIEW = ModelView("m", "1", ("1",), CONFIG, {})
RAW_CONFIG = ModelConfig(name="m", input=(ModelInput("x", DataType.FP32, dims=(-1,)),), output=CONFIG.output)
RAW_VIEW = ModelView("m", "1", ("1",), RAW_CONFIG, {})
CHECKER = RequestChecker(CONFIG)


def check_error(error: InferenceError, right: Collection[ErrorCode] = CLIENT_FAULTS) -> None:
    assert error.code in right, f"{error.code}: {error.message}"
    assert 0 < len(error.message) <= LONGEST_ERROR, len(error.message)


def check_tensors(request: InferenceRequest) -> None:
    """Check that every accepted tensor has exactly the bytes of its shape."""
    try:
        CHECKER.check(request)
        CHECKER.check_framing(request)
    except InferenceError as error:
        check_error(error)
        return
    for tensor in request.inputs:
        array = tensor.array()
        assert array.shape == tensor.shape
        if tensor.datatype is not DataType.BYTES:
            assert array.nbytes == len(tensor.data)


# ---- JSON to tensors


def outcome(decode: Callable[[], http_request.DecodedInfer]) -> tuple[Any, ...]:
    """The request and the format, or the code of the error, in which all ways of reading must agree."""
    try:
        decoded = decode()
    except InferenceError as error:
        check_error(error)
        return (error.code,)
    request = decoded.request
    tensors = [(t.name, t.datatype, t.shape, bytes(t.data)) for t in request.inputs]
    # NaN is not equal to itself, and a parameter may contain it.
    return (
        tensors,
        request.outputs,
        repr(request.parameters),
        request.id,
        request.form.priority,
        repr(decoded.destinations),
    )


def check_ways(view: ModelView, body: bytes, header_length: int | None) -> None:
    at_once = outcome(lambda: http_request.decode_infer(view, body, header_length))
    decoder = http_request.InferDecoder(view, "")
    assert outcome(lambda: decoder.decode(body, header_length)) == at_once
    assert outcome(lambda: decoder.decode(body, header_length)) == at_once, "a known JSON part"


def json_to_tensor(data: bytes) -> None:
    """An inference body, whose first byte sets the length of its JSON: read at once, in steps, and a second time."""
    if not data:
        return
    body = data[1:]
    header_length = None if data[0] >= 0xF0 else min(data[0] * 8, len(body))
    for view in (VIEW, RAW_VIEW):
        check_ways(view, body, header_length)
    if header_length != 0 and body:
        text = body if header_length is None else memoryview(body)[:header_length]
        tail = None if header_length is None else memoryview(body)[header_length:]
        small = outcome(lambda: http_request.decode_small(VIEW, text, tail, ""))
        steps = outcome(lambda: run(http_request.decode_large_steps(VIEW, text, tail, "", block_bytes=16)))
        assert steps == small
    try:
        request = http_request.decode_infer(VIEW, body, header_length).request
    except InferenceError:
        return
    check_tensors(request)


# ---- generate to tensors


def generate_outcome(decode: Callable[[], InferenceRequest]) -> tuple[Any, ...]:
    try:
        request = decode()
    except InferenceError as error:
        check_error(error, {ErrorCode.INVALID_ARG})
        return (error.code,)
    return [(t.name, t.datatype, t.shape, bytes(t.data)) for t in request.inputs], request.id, repr(request.parameters)


def generate_to_tensor(data: bytes) -> None:
    """A body of `generate`, whose first byte sets how it is cut: read at once and in steps."""
    if len(data) < 2:
        return
    body = data[1:]
    at_once = generate_outcome(lambda: generate.decode_generate(VIEW, body))
    assert generate_outcome(lambda: generate.decode_small(VIEW, body)) == at_once
    block_bytes = 16 + data[0]
    if body.strip():
        in_steps = generate_outcome(lambda: run(generate.decode_large_steps(VIEW, body, block_bytes=block_bytes)))
        assert in_steps == at_once
    if len(at_once) > 1:
        check_tensors(generate.decode_generate(VIEW, body))


# ---- gRPC contents


def grpc_contents(data: bytes) -> None:
    """A ModelInferRequest from the wire."""
    try:
        message = read_infer(data)
    except InferenceError as error:
        check_error(error, {ErrorCode.INTERNAL})
        return
    try:
        call = message.decode()
    except InferenceError as error:
        check_error(error)
        return
    check_tensors(call.request)


# ---- config.pbtxt and config.yaml


def pbtxt(data: bytes) -> None:
    check_config(read_pbtxt(data))


def config_yaml(data: bytes) -> None:
    check_config(read_yaml(data))


def check_config(parsed: ParsedConfig) -> None:
    """Check a configuration: problems have places, and a value is the same after writing and reading it."""
    for problem in parsed.problems:
        assert problem.message
        assert len(str(problem)) <= LONGEST_ERROR
    if parsed.problems:
        return
    again = read_json(to_json(parsed.config))
    assert again.problems == ()
    assert to_json(again.config) == to_json(parsed.config)


# ---- HTTP framing


class _Loop:
    """The part of an event loop that a connection uses: callbacks run in `turn`, and no time passes."""

    def __init__(self) -> None:
        self._ready: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[..., None], *arguments: Any) -> None:
        self._ready.append(lambda: callback(*arguments))

    def call_later(self, _delay: float, _callback: Callable[..., None], *_arguments: Any) -> "_Loop":
        return self

    def cancel(self) -> None:
        """Cancel the timer that `call_later` returned."""

    def turn(self) -> None:
        for _ in range(10_000):
            if not self._ready:
                return
            self._ready.pop(0)()
        raise AssertionError("the connection never comes to rest")


class _Transport(asyncio.Transport):
    """Keeps what is written, and supports flow control of reading."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_over = False
        self.is_reading_paused = False

    def write(self, data: Any) -> None:
        assert not self.is_over, "written after the end"
        self.written += data

    def writelines(self, list_of_data: Any) -> None:
        for data in list_of_data:
            self.write(data)

    def write_eof(self) -> None:
        self.is_over = True

    def close(self) -> None:
        self.is_over = True

    def abort(self) -> None:
        self.is_over = True

    def is_closing(self) -> bool:
        return self.is_over

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """All writes are sent immediately."""

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


FRAMING_LIMITS = Limits(max_headers=8, max_head_bytes=512, max_chunks=8, pipelined_bytes=1 << 20)
FRAMING_MAX_BODY = 256


STATUS = re.compile(rb"HTTP/1\.1 (\d+)")


def serve_pieces(pieces: list[bytes]) -> tuple[list[tuple[Any, ...]], list[bool]]:
    """The requests of a byte stream that arrives in these pieces, and whether each answer is a success.

    With several faults, the reported one may depend on the pieces, so that refusals are not distinguished.
    """
    taken: list[tuple[Any, ...]] = []
    faults: list[str] = []

    def handle(exchange: Exchange) -> None:
        head = exchange.head
        taken.append((head.method, head.target, dict(head.headers), bytes(exchange.body)))
        exchange.respond(200, b"", (b"%d" % len(taken),))

    listener = Listener(
        handle,
        service="HTTP",
        max_body=FRAMING_MAX_BODY,
        log=faults.append,
        limits=FRAMING_LIMITS,
        port_limits=PortLimits(),
    )
    loop = _Loop()
    transport = _Transport()
    connection = HttpConnection(listener, cast("asyncio.AbstractEventLoop", loop))
    connection.connection_made(transport)
    for piece in pieces:
        at = 0
        while at < len(piece) and not transport.is_over:
            room = connection.get_buffer(-1)
            assert len(room), "no room to receive"
            size = min(len(room), len(piece) - at)
            room[:size] = piece[at : at + size]
            connection.buffer_updated(size)
            at += size
            loop.turn()
            assert not transport.is_reading_paused
    assert faults == []
    connection.connection_lost(None)
    assert listener.shared.wire.held_bytes == 0
    assert listener.port.connection_count == 0
    return taken, [status == b"200" for status in STATUS.findall(transport.written) if status != b"100"]


def http_framing(data: bytes) -> None:
    """A byte stream, whose first byte sets where it is cut: the result does not depend on the pieces."""
    if len(data) < 2:
        return
    stream = data[1:4096]
    whole = serve_pieces([stream])
    size = data[0] % 17 + 1
    assert serve_pieces([stream[at : at + size] for at in range(0, len(stream), size)]) == whole
    cut = data[0] * len(stream) // 256
    assert serve_pieces([stream[:cut], stream[cut:]]) == whole
    requests, answers = whole
    assert answers[: len(requests)] == [True] * len(requests), "one answer per request, in order"
    assert len(answers) - len(requests) in {0, 1}, "at most one refusal, after which nothing is taken"


# ---- frames of a worker


OUTPUTS = {"y": DataType.FP32, "s": DataType.BYTES}
SPEC = WorkerSpec("m", 1, "m_0_0", 0, "CPU", 0, "", "python", "", "{}", "", "")
STORED_BYTES = 20 << 10
_LOOP = asyncio.new_event_loop()


class _Owner:
    """Records all events in a form that can be compared."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.calls: list[Any] = []
        self.cancelled: list[int] = []
        self.wants_memory = False

    def on_done(self, batch: SentBatch, done: Done) -> None:
        assert len(done.replies) == len(batch.items)
        self.wants_memory |= done.wanted_bytes > 0
        replies = [_as_sent(reply) for reply in done.replies]
        self.heard.append((batch.number, replies, done.failed, done.times, done.retained))

    def on_response(self, response: Response) -> None:
        self.heard.append((response.key, _as_sent(response.reply), response.final, response.times))

    def on_ready(self, is_ready: bool) -> None:
        self.heard.append(is_ready)

    def on_metrics(self, updates: Sequence[tuple[int, str, float]]) -> None:
        self.heard.append(repr(updates))

    async def on_call(self, call: ServiceCall[ServiceResult]) -> ServiceResult:
        self.calls.append(repr(call))
        raise InferenceError(ErrorCode.UNSUPPORTED, "not here")

    def on_infer(
        self,
        infer: Infer,
        items: Sequence[BatchItem] | None,
        on_response: Callable[[InferenceResponse], None],
    ) -> int:
        self.wants_memory |= infer.wanted_bytes > 0
        request = infer.request
        inputs = [(tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data)) for tensor in request.inputs]
        request.inputs = []
        self.heard.append((infer.batch, items and items[0].key, inputs, repr(request)))
        # Every second call ends at once; the others have one of many answers.
        final = len(self.heard) % 2 == 0
        on_response(InferenceResponse(request.model_name, "1", request.id, final=final))
        return len(self.heard)

    def on_answered(self) -> None:
        """This owner does not wait for the next call."""

    def on_cancel_call(self, ticket: int) -> None:
        # Calls in flight when the worker is lost are cancelled in any case.
        self.cancelled.append(ticket)

    def on_taken(self, ticket: int, responses: int) -> None:
        self.heard.append((ticket, responses))


def _as_sent(reply: Reply) -> Any:
    """A reply as sent to the client. Checks that every accepted tensor has exactly the bytes of its shape."""
    if not isinstance(reply, Answer):
        return reply
    try:
        outputs = check_reply(reply.outputs, OUTPUTS, (), None)
    except InferenceError as error:
        check_error(error, {ErrorCode.INTERNAL})
        return error
    for tensor in outputs:
        assert tensor.array().shape == tensor.shape
        if tensor.datatype is not DataType.BYTES:
            assert tensor.array().nbytes == len(tensor.data)
    sent = [(tensor.name, tensor.shape, bytes(tensor.data)) for tensor in outputs]
    return sent, repr(reply.parameters)


def _request(key: int, size_bytes: int) -> BatchItem:
    data = Tensor("x", DataType.INT8, (size_bytes,), bytes(size_bytes))
    return BatchItem(key, InferenceRequest("m", inputs=[data]), 1, cancelled=False)


def hear_worker(pieces: list[bytes]) -> tuple[Any, bool]:
    """The events that the server accepts from a worker with two batches and one block of memory, and the reason of its
    loss; and whether the worker requested memory, which may arrive at any time.
    """
    server_end, worker_end = socket.socketpair()
    owner, lost = _Owner(), list[str]()
    owners = Owners(owner, owner, owner, HeldStates())
    connection = Channel(server_end, SPEC, tuple(OUTPUTS), owners, lost.append, _LOOP, arena_bytes=2 * STORED_BYTES)

    async def play() -> None:
        connection.batches.execute([_request(1, 4), _request(2, 4)], 0)
        connection.batches.execute([_request(3, STORED_BYTES)], 1)
        for piece in pieces:
            with suppress(BrokenPipeError, ConnectionResetError):
                worker_end.sendall(piece)
            for _ in range(6):
                await asyncio.sleep(0)

    try:
        _LOOP.run_until_complete(play())
    finally:
        connection.close()
        worker_end.close()
    assert len(lost) <= 1
    assert all(0 < len(reason) < 500 for reason in lost)
    # Calls are answered in tasks, which end with the worker's connection.
    return (owner.heard, lost, owner.cancelled, () if lost else owner.calls), owner.wants_memory


def worker_frames(data: bytes) -> None:
    """The byte stream of a worker, whose first byte sets where it is cut: the result does not depend on the pieces."""
    if len(data) < 2:
        return
    stream = data[1:1024]
    whole = hear_worker([stream])
    if whole[1]:
        return
    # A stream of odd length in many pieces, others in two: both ways for each would take half as long again.
    if len(stream) % 2:
        size = data[0] % 64 + 16
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    else:
        cut = data[0] * len(stream) // 256
        pieces = [stream[:cut], stream[cut:]] if cut else [stream]
    assert hear_worker(pieces) == whole


def tensorflow_files(data: bytes) -> None:
    """A SavedModel and a GraphDef: cut off, each is an error or shorter."""
    with suppress(ValueError):
        parse_saved_model(data)
    with suppress(ValueError):
        graph = parse_frozen_graph(data)
        shorter = parse_frozen_graph(data[: len(data) // 2])
        assert len(shorter.nodes) <= len(graph.nodes)
        graph.needed(graph.ends(), frozenset())


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        *(http_framing, http2_frames, json_to_tensor, generate_to_tensor, pbtxt, config_yaml, grpc_contents),
        *(worker_frames, asks, model_file, tensorflow_files),
    )
}
