"""Calls of a model to other models: the requests that are sent, and the results that the model gets."""

import asyncio
import gc
import threading
import weakref

import numpy as np
import pytest

from halimede.backends.python.utils import module
from halimede.backends.python.utils.calls import ResponseIterator
from halimede.backends.python.utils.errors import TritonError, TritonModelException
from halimede.backends.python.utils.request import (
    InferenceRequest,
    InferenceTrace,
    MemoryType,
    PreferredMemory,
    get_input_tensor_by_name,
)
from halimede.backends.python.utils.response import InferenceResponse, reply_of
from halimede.backends.python.utils.session import Session
from halimede.backends.python.utils.tensor import Tensor
from halimede.core.types import DataType, ErrorCode, InferenceError
from halimede.core.types import InferenceRequest as Asked
from halimede.core.types import InferenceResponse as Answered
from halimede.core.types import Tensor as CoreTensor
from support.python_models import FakeCall, FakeHost, fp32


@pytest.fixture
def host() -> FakeHost:
    host = FakeHost(infers=lambda request: [answer(request.inputs[0])])
    session = Session(host, "/models/m/1", False, ("OUT",))
    session.serves = True
    module.install(session)
    return host


def answer(*outputs: CoreTensor, final: bool = True, **fields) -> Answered:
    return Answered("other", "3", outputs=list(outputs), final=final, **fields)


def failed(code: ErrorCode, text: str, version: str = "3") -> Answered:
    return Answered("other", version, error=InferenceError(code, text))


def several(count: int):
    """A decoupled model: answers [0], [1] ..., and an empty one at the end."""
    for number in range(count):
        yield answer(fp32("OUT", [number]), final=False)
    yield answer()


def request(**changes) -> InferenceRequest:
    ones = Tensor("IN", np.ones(2, np.float32))
    return InferenceRequest(**{"model_name": "other", "inputs": [ones], "requested_output_names": ["OUT"]} | changes)


def content_of(response: InferenceResponse) -> list | str:
    error = response.error()
    if error is not None:
        return f"{error.code().name}: {error.message()}"
    return [tensor.as_numpy().tolist() for tensor in response.output_tensors()]


def test_request_is_sent_with_all_of_its_fields(host):
    whole = request(
        request_id="r1",
        correlation_id="c",
        requested_output_names=["B", b"A", "B"],
        model_version=4,
        flags=3,
        timeout=1500,
        preferred_memory=PreferredMemory(MemoryType.TRITONSERVER_MEMORY_GPU, 1),
        trace=InferenceTrace(),
        parameters={"a": 1, "b": "x", "c": True},
    )
    whole.exec()
    request(correlation_id=5, flags=1).exec()
    request(requested_output_names=[], flags=2).exec()
    inputs = [whole.inputs()[0]._core]
    assert list(host.inferred) == [
        Asked(
            "other",
            "4",
            "r1",
            inputs,
            outputs=("B", "A"),
            parameters={"a": 1, "b": "x", "c": True},
            timeout_us=1500,
            sequence_id="c",
            sequence_start=True,
            sequence_end=True,
            wants_one=True,
        ),
        Asked("other", inputs=inputs, outputs=("OUT",), sequence_id=5, sequence_start=True, wants_one=True),
        Asked("other", inputs=inputs, sequence_end=True, wants_one=True),
    ]


def test_request_returns_its_fields(host):
    tensor = Tensor("IN", np.zeros(1))
    whole = request(inputs=(tensor,), correlation_id="s", flags=1, timeout=np.int64(7), parameters={"a": 1})
    assert get_input_tensor_by_name(whole, "IN") is tensor
    assert get_input_tensor_by_name(whole, "X") is None
    assert (whole.correlation_id(), whole.flags(), whole.timeout()) == ("s", 1, 7)
    assert (whole.parameters(), whole.requested_output_names(), whole.is_cancelled()) == ('{"a":1}', {"OUT"}, False)


def test_flags_set_after_construction_are_sent(host):
    later = request()
    later.set_flags(1)
    later.exec()
    assert host.inferred[0].sequence_start


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"inputs": None}, TypeError, "'inputs' must be a list of Tensor"),
        ({"inputs": [np.ones(1)]}, TypeError, r"'inputs\[0\]' must be Tensor, not ndarray"),
        ({"inputs": [None], "request_id": "r"}, TritonModelException, "Input tensor for request with id 'r' and model name 'other' should not be empty."),
        ({"requested_output_names": ["A", ""]}, TritonModelException, "Requested output name for request with id '' and model name 'other' should not be empty."),
        ({"requested_output_names": None}, TypeError, "'requested_output_names' must be a list of str"),
        ({"requested_output_names": "OUT"}, TypeError, "'requested_output_names' must be a list of str"),
        ({"requested_output_names": [1]}, TypeError, r"'requested_output_names\[0\]' must be str, not int"),
        ({"model_name": None}, TypeError, "'model_name' must be str, not NoneType"),
        ({"model_version": "1"}, TypeError, "'model_version' must be int, not str"),
        ({"request_id": 1}, TypeError, "'request_id' must be str, not int"),
        ({"correlation_id": 1.5}, TritonModelException, "Correlation ID must be integer or string"),
        ({"correlation_id": None}, TypeError, "'correlation_id' must be int, not NoneType"),
        ({"correlation_id": -1}, TypeError, "'correlation_id' must be from 0"),
        ({"flags": -1}, TypeError, "'flags' must be from 0"),
        ({"timeout": -1}, TypeError, "'timeout' must be from 0"),
        ({"timeout": 1.5}, TypeError, "'timeout' must be int"),
        ({"preferred_memory": 0}, TypeError, "'preferred_memory' must be PreferredMemory"),
        ({"trace": 1}, TypeError, "'trace' must be InferenceTrace"),
        ({"nonsense": 1}, TypeError, "unexpected keyword argument 'nonsense'"),
        ({"parameters": {"a": [1]}}, TritonModelException, "Expect parameters values to have type bool/int/str, found type <class 'list'>"),
        ({"parameters": {"a": 0.5}}, TritonModelException, "Expect parameters values to have type bool/int/str, found type <class 'float'>"),
        ({"parameters": [("a", 1)]}, TypeError, "'parameters' must be dict, not list"),
        # Types are checked before values.
        ({"inputs": [None], "model_version": "1"}, TypeError, "'model_version' must be int, not str"),
        ({"inputs": [None, 5]}, TypeError, r"'inputs\[0\]' must be Tensor, not NoneType"),
        ({"inputs": [None], "parameters": 5}, TypeError, "'parameters' must be dict, not int"),
        ({"correlation_id": 1.5, "model_name": 5}, TypeError, "'model_name' must be str, not int"),
        ({"parameters": {1: 1}}, TritonModelException, "Expect parameters keys to have type str, found type <class 'int'>"),
    ],
)  # fmt: skip
def test_invalid_request_arguments_are_refused_by_the_constructor(host, changes, error, text):
    with pytest.raises(error, match=text):
        request(**changes)


@pytest.mark.parametrize("how", ["exec", "async_exec"])
def test_decoupled_argument_must_be_a_bool(host, how):
    async def ask(decoupled):
        return getattr(request(), how)(decoupled)

    with pytest.raises(TypeError, match=r"'decoupled' must be bool, not str"):
        asyncio.run(ask("no"))


def test_response_has_views_of_received_outputs_and_parameters(host):
    memory = bytearray(np.array([2, 3], np.float32).tobytes())
    out = CoreTensor("OUT", DataType.FP32, (2,), memoryview(memory))
    host.infers = lambda _: [answer(out, parameters={"a": 1})]
    response = request().exec()
    [tensor] = response.output_tensors()
    tensor.as_numpy()[0] = 9
    assert (response.has_error(), response.error(), response.parameters()) == (False, None, '{"a":1}')
    assert np.frombuffer(memory, np.float32).tolist() == [9, 3]
    assert tensor._core.data is out.data


def test_output_is_passed_on_without_a_copy(host):
    out = CoreTensor("OUT", DataType.BF16, (2,), memoryview(b"\0\1\2\3"))
    host.infers = lambda _: [answer(out)]
    [tensor] = request().exec().output_tensors()
    request(inputs=[tensor]).exec()
    assert host.inferred[1].inputs[0].data is out.data
    assert (
        reply_of(InferenceResponse([tensor]), ("OUT",), Session(host, "", False, ("OUT",))).outputs[0].data is out.data
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        # The error text of the called model is passed on unchanged.
        (failed(ErrorCode.NOT_FOUND, "no such row"), "NOT_FOUND: no such row"),
        (failed(ErrorCode.UNAVAILABLE, "no rows now"), "UNAVAILABLE: no rows now"),
        (
            failed(ErrorCode.UNAVAILABLE, "model 'other' is not ready: dead"),
            "UNAVAILABLE: Model other - Error when running inference: Failed for execute the inference request."
            " Model 'other' is not ready. dead",
        ),
        (
            failed(ErrorCode.NOT_FOUND, "Request for unknown model: 'other' is not found", ""),
            "NOT_FOUND: Model other - Error when running inference: Request for unknown model: 'other' is not found",
        ),
        (
            failed(ErrorCode.UNAVAILABLE, "Request for unknown model: 'other' is loading", ""),
            "UNAVAILABLE: Model other - Error when running inference: Failed for execute the inference request."
            " Model 'other' is not ready. Request for unknown model: 'other' is loading",
        ),
        (
            failed(ErrorCode.UNAVAILABLE, "ensemble 'other' is not ready: dead", ""),
            "UNAVAILABLE: Model other - Error when running inference: Failed for execute the inference request."
            " Model 'other' is not ready. ensemble 'other' is not ready: dead",
        ),
        (
            failed(ErrorCode.UNAVAILABLE, "Exceeds maximum queue size", ""),
            "UNAVAILABLE: Model other - Error when running inference: Exceeds maximum queue size",
        ),
        (
            failed(ErrorCode.INVALID_ARG, "unexpected inference output 'X'", ""),
            "INVALID_ARG: Model other - Error when running inference: unexpected inference output 'X'",
        ),
    ],
)  # fmt: skip
def test_failure_of_a_call_is_the_error_of_its_response(host, given, text):
    host.infers = lambda _: [given]
    response = request().exec()
    assert response.has_error()
    assert response.output_tensors() == []
    assert content_of(response) == text

    async def ask():
        return await request().async_exec()

    assert content_of(asyncio.run(ask())) == text
    assert [content_of(each) for each in request().exec(decoupled=True)] == [text]


def test_unsendable_call_gives_a_response_with_an_error(host):
    def refuse(_):
        raise InferenceError(ErrorCode.INVALID_ARG, "too many inputs")

    host.infers = refuse
    text = "INVALID_ARG: Model other - Error when running inference: too many inputs"

    async def ask():
        return content_of(await request().async_exec())

    assert content_of(request().exec()) == text
    assert [content_of(each) for each in request().exec(decoupled=True)] == [text]
    assert asyncio.run(ask()) == text


def test_call_states_whether_it_wants_exactly_one_response(host):
    host.infers = lambda _: [answer(fp32("OUT", [1]))]

    async def ask(decoupled):
        await request().async_exec(decoupled)

    for decoupled in (False, True):
        request().exec(decoupled)
        asyncio.run(ask(decoupled))
    assert [core.form.wants_one for core in host.inferred] == [True, True, False, False]


def test_second_iteration_starts_at_the_first_response(host):
    came = []

    def model(_):
        for each in several(2):
            came.append(each)
            yield each

    host.infers = model
    responses = request().exec(decoupled=True)
    assert isinstance(responses, ResponseIterator)
    assert came == []
    assert content_of(next(responses)) == [[0.0]]
    assert len(came) == 1
    # An iteration that begins before the end continues at the current response.
    assert [content_of(each) for each in responses] == [[[1.0]], []]
    for _ in range(2):
        assert [content_of(each) for each in responses] == [[[0.0]], [[1.0]], []]
    with pytest.raises(StopIteration, match=r"Iteration is done for the responses\."):
        next(responses)


def test_an_error_among_responses_does_not_end_them(host):
    middle = failed(ErrorCode.NOT_FOUND, "mid")
    middle.final = False
    host.infers = lambda _: [answer(fp32("OUT", [1]), final=False), middle, answer(fp32("OUT", [2]))]
    assert [content_of(each) for each in request().exec(decoupled=True)] == [[[1.0]], "NOT_FOUND: mid", [[2.0]]]


def test_responses_can_be_awaited_one_by_one(host):
    host.infers = lambda _: several(2)

    async def ask():
        responses = await request().async_exec(decoupled=True)
        first = [content_of(each) async for each in responses]
        return first, [content_of(each) async for each in responses], [content_of(each) for each in responses]

    assert asyncio.run(ask()) == ([[[0.0]], [[1.0]], []],) * 3


def test_threads_that_share_an_iterator_get_each_response_once(host):
    host.infers = lambda _: several(100)
    responses = request().exec(decoupled=True)
    got = []

    def take():
        got.extend(map(str, map(content_of, responses)))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Who finds the end of the responses and asks once more begins anew: that is another iteration.
    assert {f"[[{number}.0]]" for number in range(100)} <= set(got)
    assert len(got) % 101 == 0


def kept_calls(host: FakeHost) -> list[FakeCall]:
    calls: list[FakeCall] = []
    infer = host.infer
    host.infer = lambda core: calls.append(infer(core)) or calls[-1]
    return calls


def test_cancelled_iterator_still_yields_responses_until_the_end(host):
    host.infers = lambda _: several(2)
    calls = kept_calls(host)
    responses = request().exec(decoupled=True)
    next(responses)
    assert responses.cancel() is None
    assert (calls[0].cancelled, calls[0].is_read_on) == (True, True)
    assert [content_of(each) for each in responses] == [[[1.0]], []]
    responses.cancel()


def test_dropped_iterator_cancels_its_call(host):
    host.infers = lambda _: several(2)
    calls = kept_calls(host)
    responses = request().exec(decoupled=True)
    next(responses)
    watched = weakref.ref(calls.pop())
    del responses
    gc.collect()
    assert watched() is None


def test_finished_iterator_releases_its_call(host):
    host.infers = lambda _: several(2)
    calls = kept_calls(host)
    responses = request().exec(decoupled=True)
    list(responses)
    watched = weakref.ref(calls.pop())
    gc.collect()
    assert watched() is None


class Slow(FakeCall):
    """Answers when the gate opens, without blocking the loop."""

    def __init__(self, core: Asked, gate: asyncio.Event) -> None:
        super().__init__(core, [answer(fp32("OUT", [1]))])
        self.gate = gate

    async def receive_async(self):
        await self.gate.wait()
        return self.receive()


def test_async_calls_are_sent_before_they_are_awaited(host):
    async def ask():
        gate = asyncio.Event()
        host.infer = lambda core: host.inferred.append(core) or Slow(core, gate)
        futures = [request(request_id=str(number)).async_exec() for number in range(3)]
        assert [core.id for core in host.inferred] == ["0", "1", "2"]
        assert all(isinstance(future, asyncio.Future) for future in futures)
        asyncio.get_running_loop().call_later(0, gate.set)
        return [content_of(response) for response in await asyncio.gather(*futures)]

    assert asyncio.run(ask()) == [[[1.0]]] * 3


@pytest.mark.parametrize("first_steps", [0, 1])
@pytest.mark.parametrize("decoupled", [False, True])
def test_a_cancelled_future_cancels_its_call(host, first_steps, decoupled):
    async def ask():
        calls = []
        host.infer = lambda core: calls.append(Slow(core, asyncio.Event())) or calls[-1]
        future = request().async_exec(decoupled=decoupled)
        for _ in range(first_steps):
            await asyncio.sleep(0)
        assert future.cancel()
        with pytest.raises(asyncio.CancelledError):
            await future
        return calls[0].cancelled

    assert asyncio.run(ask())


def test_unreferenced_future_still_completes(host):
    async def ask():
        gate, came = asyncio.Event(), asyncio.Event()

        class Told(Slow):
            async def receive_async(self):
                received = await super().receive_async()
                came.set()
                return received

        host.infer = lambda core: Told(core, gate)
        request().async_exec()
        gc.collect()
        gate.set()
        await asyncio.wait_for(came.wait(), 10)

    asyncio.run(ask())


def test_without_a_running_loop_there_is_no_future(host):
    with pytest.raises(RuntimeError, match=r"^no running event loop$"):
        request().async_exec()
    assert not host.inferred


def test_an_error_of_a_call_is_a_triton_error(host):
    host.infers = lambda _: [failed(ErrorCode.CANCELLED, "gone")]
    error = request().exec().error()
    assert isinstance(error, TritonError)
    assert (error.code(), error.message()) == (TritonError.CANCELLED, "gone")
