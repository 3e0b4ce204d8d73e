"""The size limit of gRPC messages, compressed or not, with default limits; and the memory of large ones."""

import queue
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from onnx import helper
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

from support.calls import metric
from support.h2client import INFER, LIVE, STREAM_INFER, H2Client, grpc_message
from support.models import add_identity, save_onnx
from support.processes import forget_peak, peak_bytes, resident_bytes
from support.server import RunningServer, Start, serving, wait_until

MIB = 1 << 20
ZEROS = bytes(MIB)
LIMIT_BYTES = 64 * MIB
NAMES_THE_FLAG = f"exceeds the maximum allowed value of {LIMIT_BYTES} bytes. Use --grpc-max-input-size to increase"
RESOURCE_EXHAUSTED = str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
CODINGS = [None, "gzip", "deflate"]
LARGE_CODINGS = [None, "gzip", pytest.param("deflate", marks=pytest.mark.large)]
"""Of tests with messages of the largest size: both codings are inflated by the same code."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = tmp_path_factory.mktemp("models")
    add_identity(models, "ident", dims="-1", max_batch_size=0)
    with serving(tmp_path_factory.mktemp("log"), ["--model-repository", models, "--exit-timeout-secs=5"]) as running:
        with triton.InferenceServerClient(running.grpc_url) as client:
            client.infer("ident", [tensor(16)])
        yield running
    assert "Traceback" not in running.log


def tensor(size_bytes: int) -> triton.InferInput:
    made = triton.InferInput("IN", [size_bytes // 4], "FP32")
    made.set_data_from_numpy(np.zeros(size_bytes // 4, np.float32))
    return made


def request(size_bytes: int) -> Iterator[bytes]:
    """A serialized request whose tensor has this number of zeros, in pieces."""
    message = pb.ModelInferRequest(model_name="ident")
    message.inputs.add(name="IN", datatype="FP32", shape=[size_bytes // 4])
    yield message.SerializeToString() + b"\x3a" + varint(size_bytes)
    yield from [ZEROS] * (size_bytes // MIB)


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


@cache
def block(piece: bytes) -> bytes:
    """The piece, compressed without reference to what is before it."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(piece) + packer.flush(zlib.Z_FULL_FLUSH)


def packed(pieces: Iterator[bytes], coding: str = "gzip") -> bytes:
    """The pieces as one compressed gRPC message. Equal pieces are compressed once."""
    head = b"\x1f\x8b\x08" + bytes(7) if coding == "gzip" else b"\x78\xda"
    check, size, blocks = (0 if coding == "gzip" else 1), 0, []
    for piece in pieces:
        check = zlib.crc32(piece, check) if coding == "gzip" else zlib.adler32(piece, check)
        size += len(piece)
        blocks.append(block(piece))
    end = struct.pack("<II", check, size) if coding == "gzip" else struct.pack(">I", check)
    return grpc_message(b"".join([head, *blocks, b"\x03\x00", end]), compressed=True)


@cache
def half_a_gigabyte() -> bytes:
    return packed(request(512 * MIB))


def growth_bytes(server: RunningServer, work: Callable[[], None]) -> int:
    before = resident_bytes(server)
    forget_peak(server)
    work()
    return peak_bytes(server) - before


def ended(server: RunningServer) -> int:
    """The number of requests that the model has executed or refused."""
    succeeded = metric(server, "nv_inference_request_success", "ident")
    return int(succeeded + metric(server, "nv_inference_request_failure", "ident", labels='reason="REJECTED",'))


def connect(stack: ExitStack, server: RunningServer, *, is_greedy: bool = True) -> H2Client:
    return stack.enter_context(H2Client(("127.0.0.1", server.grpc_port), is_greedy=is_greedy))


# tritonclient


@pytest.mark.parametrize("coding", LARGE_CODINGS)
def test_the_largest_message_is_served(server: RunningServer, coding: str | None) -> None:
    with triton.InferenceServerClient(server.grpc_url) as client:
        answer = client.infer("ident", [tensor(LIMIT_BYTES - 100)], compression_algorithm=coding)
    assert answer.as_numpy("OUT").shape == ((LIMIT_BYTES - 100) // 4,)


@pytest.mark.parametrize(
    ("coding", "size_bytes"),
    [
        *((coding, LIMIT_BYTES) for coding in (None, "gzip")),
        (None, LIMIT_BYTES + 36 * MIB),
        pytest.param("gzip", LIMIT_BYTES + 36 * MIB, marks=pytest.mark.large),
        *(pytest.param("deflate", LIMIT_BYTES + more, marks=pytest.mark.large) for more in (0, 36 * MIB)),
    ],
)
def test_a_larger_one_is_refused_and_the_error_names_the_flag(
    server: RunningServer, coding: str | None, size_bytes: int
) -> None:
    """An inflation ends at the limit, so that it makes no difference by how much the message is larger."""
    with triton.InferenceServerClient(server.grpc_url) as client:
        with pytest.raises(InferenceServerException) as caught:
            client.infer("ident", [tensor(size_bytes)], compression_algorithm=coding)
        assert caught.value.status() == str(grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert NAMES_THE_FLAG in caught.value.message()
        assert client.is_server_live()


@pytest.mark.parametrize("coding", CODINGS)
def test_a_stream_of_tritonclient_with_each_compression(server: RunningServer, coding: str | None) -> None:
    answers: queue.Queue = queue.Queue()
    with triton.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)), compression_algorithm=coding)
        for size_bytes in (400, 8 * MIB):
            client.async_stream_infer("ident", [tensor(size_bytes)])
        got = [answers.get(timeout=60) for _ in range(2)]
    assert [(error, result.as_numpy("OUT").nbytes) for result, error in got] == [(None, 400), (None, 8 * MIB)]


@pytest.mark.parametrize("coding", LARGE_CODINGS)
def test_a_message_that_is_too_large_ends_its_stream(server: RunningServer, coding: str | None) -> None:
    with ExitStack() as stack:
        client = connect(stack, server)
        pieces = request(LIMIT_BYTES)
        message = packed(pieces, coding) if coding else grpc_message(b"".join(pieces))
        stream = client.call(STREAM_INFER, None, [("grpc-encoding", coding)] if coding else [])
        client.send_data(stream, message, is_end=False)
        ended = client.finish(stream)
    assert ended["grpc-status"] == RESOURCE_EXHAUSTED
    assert NAMES_THE_FLAG in ended["grpc-message"]


def test_an_answer_may_be_larger_than_a_request(repository: Path, start: Start) -> None:
    twice = helper.make_node("Concat", ["IN", "IN"], ["OUT"], axis=0)
    save_onnx(repository / "twice" / "1" / "model.onnx", [twice], [("IN", "FP32", [150])], [("OUT", "FP32", [300])])
    server = start("--model-repository", repository, "--grpc-max-input-size=1000")
    with triton.InferenceServerClient(server.grpc_url) as client:
        answer = client.infer("twice", [tensor(600)])
        assert answer.as_numpy("OUT").nbytes == 1200


# Control calls


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_compressed_control_call_is_inflated_up_to_its_limit_only(server: RunningServer, coding: str) -> None:
    with ExitStack() as stack:
        client = connect(stack, server)
        fields = [("grpc-encoding", coding)]
        ready = "/inference.GRPCInferenceService/ModelReady"
        name = pb.ModelReadyRequest(name="ident")
        stream = client.call(ready, packed(iter([name.SerializeToString()]), coding), fields)
        assert client.finish(stream)["grpc-status"] == "0"
        assert client.data(stream) == grpc_message(b"\x08\x01")
        bomb = packed(iter([ZEROS] * 80), coding)
        assert len(bomb) > 64 << 10
        stream = client.call(LIVE, bomb, fields)
        assert "at most 65536 are taken" in client.finish(stream)["grpc-message"]
        bomb = packed(iter([ZEROS] * 40), coding)
        assert len(bomb) < 64 << 10

        def send() -> None:
            stream = client.call(LIVE, bomb, fields)
            ended = client.finish(stream)
            assert (ended["grpc-status"], "the request has more than 65536 bytes" in ended["grpc-message"]) == (
                "3",
                True,
            )

        assert growth_bytes(server, send) < 8 * MIB


# Memory


@pytest.mark.parametrize("count", [1, 6, pytest.param(16, marks=pytest.mark.large)])
def test_half_a_megabyte_that_inflates_to_half_a_gigabyte_is_refused(server: RunningServer, count: int) -> None:
    """Without a bound 16 would use 4.4 GB."""
    bomb = half_a_gigabyte()
    assert len(bomb) < 600_000

    def send() -> None:
        with ExitStack() as stack:
            clients = [connect(stack, server) for _ in range(count)]
            streams = [client.call(INFER, bomb, [("grpc-encoding", "gzip")]) for client in clients]
            assert server.get("/v2/health/live").status == 200
            for client, stream in zip(clients, streams, strict=True):
                ended = client.finish(stream, 60)
                assert (ended["grpc-status"], NAMES_THE_FLAG in ended["grpc-message"]) == (RESOURCE_EXHAUSTED, True)

    # Measured: 92 and 218 MiB.
    assert growth_bytes(server, send) < (256 if count == 1 else 512) * MIB


@pytest.mark.parametrize("path", [INFER, STREAM_INFER])
def test_inflated_bytes_of_all_calls_together_are_bounded(server: RunningServer, path: str) -> None:
    message = packed(request(LIMIT_BYTES - MIB))
    fields = [("grpc-encoding", "gzip")]
    before = ended(server)

    def send() -> None:
        with ExitStack() as stack:
            # The clients read no answers.
            for _ in range(6):
                client = connect(stack, server, is_greedy=False)
                client.send_data(client.call(path, None, fields), message, is_end=path == INFER)
            # The model's queue takes 256 MiB, and refuses the others if they come before it has run these.
            wait_until(lambda: ended(server) == before + 6, "all requests to end", server)
            with triton.InferenceServerClient(server.grpc_url) as other:
                assert other.infer("ident", [tensor(400)], compression_algorithm="gzip").as_numpy("OUT").nbytes == 400
                other.infer("ident", [tensor(4 * MIB)])

    # Measured: 500 to 640 MiB; requests, their copies and answers of all six would take twice as much.
    assert growth_bytes(server, send) < 900 * MIB
    # Clients that have disconnected hold nothing: there is room for one more, which no model takes.
    unknown = packed(piece.replace(b"ident", b"nobod", 1) for piece in request(LIMIT_BYTES - MIB))
    with ExitStack() as stack:
        client = connect(stack, server)
        assert client.finish(client.call(INFER, unknown, fields), 60)["grpc-status"] == "5"


def test_a_refused_message_is_not_kept(server: RunningServer) -> None:
    """An error that keeps its traceback would keep the received message until a garbage collection."""
    message = b"".join(request(LIMIT_BYTES - MIB))
    with ExitStack() as stack:
        client = connect(stack, server)
        unknown = message.replace(b"ident", b"nobod", 1)

        def send() -> None:
            assert client.finish(client.call(INFER, grpc_message(unknown)))["grpc-status"] == "5"

        send()
        before = resident_bytes(server)
        for _ in range(3):
            send()
        assert resident_bytes(server) - before < 128 * MIB
