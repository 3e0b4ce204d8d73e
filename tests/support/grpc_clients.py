"""The gRPC clients of Python, each with the same plans: grpcio and NVIDIA's tritonclient, with threads and with asyncio."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

from support.grpc_plans import LIMIT_S, Answer, Plan, Result

UNARY = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
COMPRESSIONS = {"": None, "gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}
REPEATERS = 4
CALL_LIMIT_S = 20


@dataclass(slots=True)
class InThread:
    """A plan that runs in a thread."""

    thread: threading.Thread
    told: threading.Event
    ended: list[Result]

    def tell(self) -> None:
        self.told.set()

    def result(self) -> Result:
        self.thread.join(LIMIT_S)
        assert self.ended, "the client has not ended, or it failed with an exception that pytest shows"
        return self.ended[0]


class PythonClient:
    """Runs plans by a function that gets the plan and the event of `tell`."""

    compressions = ("gzip", "deflate")

    def __init__(self, work: Callable[[Plan, threading.Event], Result]) -> None:
        self._work = work

    def start(self, plan: Plan) -> InThread:
        told = threading.Event()
        ended: list[Result] = []
        thread = threading.Thread(target=lambda: ended.append(self._work(plan, told)))
        thread.start()
        return InThread(thread, told, ended)


def channel_options(plan: Plan) -> list[tuple[str, int]]:
    options = [
        # By default all channels of a process share one connection.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        # A call that has begun while the connection's GOAWAY arrives is repeated only if its request fits in here. By
        # default 256 KiB do.
        ("grpc.per_rpc_retry_buffer_size", 16 << 20),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 200),
    ]
    if plan.keepalive_ms:
        options += [
            ("grpc.keepalive_time_ms", plan.keepalive_ms),
            ("grpc.keepalive_timeout_ms", 1000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]
    return options


def read_file(path: str) -> bytes | None:
    if not path:
        return None
    with open(path, "rb") as file:
        return file.read()


def credentials(plan: Plan) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(read_file(plan.root), read_file(plan.key), read_file(plan.certificate))


def request(plan: Plan, request_id: str = "0") -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name=plan.model, id=request_id, raw_input_contents=[plan.content()])
    made.inputs.add(name="IN", datatype="FP32", shape=[1, plan.elements])
    for name, value in plan.parameters.items():
        made.parameters[name].int64_param = value
    return made


def read(plan: Plan, response: pb.ModelInferResponse, error: str = "") -> Answer:
    outputs = response.raw_output_contents
    parameters = {
        name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in response.parameters.items()
    }
    return Answer(response.id, error, len(outputs) == 1 and outputs[0] == plan.content(), parameters)


def read_streamed(plan: Plan, message: pb.ModelStreamInferResponse) -> Answer:
    return read(plan, message.infer_response, message.error_message)


def failed(error: grpc.RpcError, answers: list[Answer] | None = None) -> Result:
    code = error.code()
    return Result(code.name, error.details() or "", answers or [])


def failed_triton(error: InferenceServerException, answers: list[Answer] | None = None) -> Result:
    return Result((error.status() or "").removeprefix("StatusCode."), error.message(), answers or [])


def call_options(plan: Plan) -> dict[str, Any]:
    return {
        "metadata": [*plan.metadata.items(), *plan.binary_metadata.items()],
        "timeout": plan.deadline_ms / 1000 if plan.deadline_ms else None,
        "compression": COMPRESSIONS[plan.compression],
    }


def repeat(call: Callable[[], Result], told: threading.Event) -> Result:
    """Call without pause until told."""
    whole = Result()
    lock = threading.Lock()

    def caller() -> None:
        while not told.is_set():
            one = call()
            with lock:
                whole.codes[one.code] = whole.codes.get(one.code, 0) + 1
                if one.code != "OK":
                    whole.messages.append(one.message)
            if one.code != "OK":
                # While no server listens each call fails at once.
                told.wait(0.001)

    with ThreadPoolExecutor(REPEATERS) as pool:
        for each in [pool.submit(caller) for _ in range(REPEATERS)]:
            each.result()
    return whole


# grpcio with threads.


def run_grpcio(plan: Plan, told: threading.Event) -> Result:
    options = channel_options(plan)
    with (
        grpc.secure_channel(plan.target, credentials(plan), options)
        if plan.root
        else grpc.insecure_channel(plan.target, options)
    ) as channel:
        match plan.action:
            case "infer":
                return _infer_grpcio(channel, plan, told)
            case "stream":
                return _stream_grpcio(channel, plan)
        return repeat(lambda: _infer_grpcio(channel, plan, told), told)


def _infer_grpcio(channel: grpc.Channel, plan: Plan, told: threading.Event) -> Result:
    infer = channel.unary_unary(UNARY, pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString)
    try:
        call = infer.future(request(plan), **call_options(plan))
        if plan.cancel == "line":
            told.wait(LIMIT_S)
            call.cancel()
        return Result("OK", "", [read(plan, call.result(CALL_LIMIT_S))])
    except grpc.FutureCancelledError:
        return Result(call.code().name, call.details())
    except grpc.RpcError as error:
        return failed(error)


def _stream_grpcio(channel: grpc.Channel, plan: Plan) -> Result:
    infer = channel.stream_stream(
        STREAM, pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString
    )
    is_over = threading.Event()

    def requests() -> Iterator[pb.ModelInferRequest]:
        for number in range(plan.requests):
            yield request(plan, str(number))
        if plan.cancel != "never":
            is_over.wait(LIMIT_S)

    answers: list[Answer] = []
    call = infer(requests(), **call_options(plan))
    try:
        for message in call:
            answers.append(read_streamed(plan, message))
            if plan.cancel == "first":
                call.cancel()
    except grpc.RpcError as error:
        return failed(error, answers)
    finally:
        is_over.set()
    return Result("OK", "", answers)


# grpcio with asyncio.


async def until_told(told: threading.Event) -> None:
    while not told.is_set():
        await asyncio.sleep(0.005)


async def repeat_aio(call: Callable[[], Awaitable[Result]], told: threading.Event) -> Result:
    """As `repeat`."""
    whole = Result()

    async def caller() -> None:
        while not told.is_set():
            one = await call()
            whole.codes[one.code] = whole.codes.get(one.code, 0) + 1
            if one.code != "OK":
                whole.messages.append(one.message)
                await asyncio.sleep(0.001)

    await asyncio.gather(*(caller() for _ in range(REPEATERS)))
    return whole


def run_grpcio_aio(plan: Plan, told: threading.Event) -> Result:
    return asyncio.run(_run_grpcio_aio(plan, told))


async def _run_grpcio_aio(plan: Plan, told: threading.Event) -> Result:
    options = channel_options(plan)
    async with (
        grpc.aio.secure_channel(plan.target, credentials(plan), options)
        if plan.root
        else grpc.aio.insecure_channel(plan.target, options)
    ) as channel:
        match plan.action:
            case "infer":
                return await _infer_grpcio_aio(channel, plan, told)
            case "stream":
                return await _stream_grpcio_aio(channel, plan)
        return await repeat_aio(lambda: _infer_grpcio_aio(channel, plan, told), told)


async def _infer_grpcio_aio(channel: grpc.aio.Channel, plan: Plan, told: threading.Event) -> Result:
    infer = channel.unary_unary(UNARY, pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString)
    call = infer(request(plan), **call_options(plan))
    try:
        if plan.cancel == "line":
            await until_told(told)
            call.cancel()
        return Result("OK", "", [read(plan, await call)])
    except asyncio.CancelledError:
        return Result((await call.code()).name, await call.details())
    except grpc.RpcError as error:
        return failed(error)


async def _stream_grpcio_aio(channel: grpc.aio.Channel, plan: Plan) -> Result:
    infer = channel.stream_stream(
        STREAM, pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString
    )
    call = infer(**call_options(plan))
    answers: list[Answer] = []
    try:
        for number in range(plan.requests):
            await call.write(request(plan, str(number)))
        if plan.cancel == "never":
            await call.done_writing()
        async for message in call:
            answers.append(read_streamed(plan, message))
            if plan.cancel == "first":
                call.cancel()
    except asyncio.CancelledError:
        return Result((await call.code()).name, await call.details(), answers)
    except grpc.RpcError as error:
        return failed(error, answers)
    return Result((await call.code()).name, "", answers)


# tritonclient with threads.


def _triton_client(module: Any, plan: Plan) -> Any:
    return module.InferenceServerClient(
        plan.target,
        ssl=bool(plan.root),
        root_certificates=plan.root or None,
        private_key=plan.key or None,
        certificate_chain=plan.certificate or None,
        channel_args=channel_options(plan),
    )


def _triton_request(plan: Plan, request_id: str = "0") -> dict[str, Any]:
    tensor = triton.InferInput("IN", [1, plan.elements], "FP32")
    tensor.set_data_from_numpy(np.frombuffer(plan.content(), np.float32).reshape(1, -1))
    return {
        "model_name": plan.model,
        "inputs": [tensor],
        "request_id": request_id,
        "parameters": dict(plan.parameters) or None,
    }


def _triton_options(plan: Plan, timeout: str = "client_timeout") -> dict[str, Any]:
    return {
        timeout: plan.deadline_ms / 1000 if plan.deadline_ms else None,
        "headers": {**plan.metadata, **plan.binary_metadata},
        "compression_algorithm": plan.compression or None,
    }


def run_triton(plan: Plan, told: threading.Event) -> Result:
    with _triton_client(triton, plan) as client:
        match plan.action:
            case "infer":
                return _infer_triton(client, plan, told)
            case "stream":
                return _stream_triton(client, plan)
        return repeat(lambda: _infer_triton(client, plan, told), told)


def _infer_triton(client: triton.InferenceServerClient, plan: Plan, told: threading.Event) -> Result:
    if plan.cancel == "never":
        try:
            result = client.infer(**_triton_request(plan), **_triton_options(plan))
        except InferenceServerException as error:
            return failed_triton(error)
        return Result("OK", "", [read(plan, result.get_response())])
    errors: list[InferenceServerException] = []
    is_done = threading.Event()

    def done(result: triton.InferResult | None, error: InferenceServerException) -> None:
        errors.append(error)
        is_done.set()

    context = client.async_infer(**_triton_request(plan), callback=done, **_triton_options(plan))
    told.wait(LIMIT_S)
    context.cancel()
    assert is_done.wait(CALL_LIMIT_S)
    return failed_triton(errors[0])


def _stream_triton(client: triton.InferenceServerClient, plan: Plan) -> Result:
    answers: list[Answer] = []
    errors: list[InferenceServerException] = []
    has_answer = threading.Event()

    def take(result: triton.InferResult | None, error: InferenceServerException | None) -> None:
        if result is not None:
            answers.append(read(plan, result.get_response()))
        elif error is not None and error.status() is None:
            answers.append(Answer("", error.message()))
        elif error is not None:
            errors.append(error)
        has_answer.set()

    client.start_stream(take, **_triton_options(plan, "stream_timeout"))
    for number in range(plan.requests):
        client.async_stream_infer(**_triton_request(plan, str(number)))
    if plan.cancel == "first":
        assert has_answer.wait(CALL_LIMIT_S)
    client.stop_stream(cancel_requests=plan.cancel == "first")
    return failed_triton(errors[0], answers) if errors else Result("OK", "", answers)


# tritonclient with asyncio.


def run_triton_aio(plan: Plan, told: threading.Event) -> Result:
    return asyncio.run(_run_triton_aio(plan, told))


async def _run_triton_aio(plan: Plan, told: threading.Event) -> Result:
    async with _triton_client(triton_aio, plan) as client:
        match plan.action:
            case "infer":
                return await _infer_triton_aio(client, plan, told)
            case "stream":
                return await _stream_triton_aio(client, plan)
        return await repeat_aio(lambda: _infer_triton_aio(client, plan, told), told)


async def _infer_triton_aio(client: triton_aio.InferenceServerClient, plan: Plan, told: threading.Event) -> Result:
    inferring = asyncio.ensure_future(client.infer(**_triton_request(plan), **_triton_options(plan)))
    try:
        if plan.cancel == "line":
            await until_told(told)
            inferring.cancel()
        return Result("OK", "", [read(plan, (await inferring).get_response())])
    except asyncio.CancelledError:
        return Result("CANCELLED")
    except InferenceServerException as error:
        return failed_triton(error)


async def _stream_triton_aio(client: triton_aio.InferenceServerClient, plan: Plan) -> Result:
    is_over = asyncio.Event()

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(plan.requests):
            yield _triton_request(plan, str(number))
        if plan.cancel != "never":
            await is_over.wait()

    answers: list[Answer] = []
    stream = client.stream_infer(requests(), **_triton_options(plan, "stream_timeout"))
    try:
        async for result, error in stream:
            answers.append(Answer("", error.message()) if error is not None else read(plan, result.get_response()))
            if plan.cancel == "first":
                stream.cancel()
    except asyncio.CancelledError:
        return Result("CANCELLED", "", answers)
    except grpc.RpcError as error:
        return failed(error, answers)
    finally:
        is_over.set()
    return Result("OK", "", answers)


PYTHON_CLIENTS = {
    "grpcio": PythonClient(run_grpcio),
    "grpcio-aio": PythonClient(run_grpcio_aio),
    "tritonclient": PythonClient(run_triton),
    "tritonclient-aio": PythonClient(run_triton_aio),
}
