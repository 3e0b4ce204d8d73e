"""Calls for models that are not known in this process yet."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from halimede.core.types import ErrorCode, InferenceError
from halimede.facade.lookup import ModelLookup
from support.background import in_background
from support.server import wait_until

UNKNOWN = InferenceError(ErrorCode.NOT_FOUND, "Request for unknown model: 'ident' is not found")
LIMIT_S = 20


def asking(request_id: str = "", model: str = "ident") -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model, id=request_id, raw_input_contents=[b"\0" * 4])
    message.inputs.add(name="IN", datatype="FP32", shape=[1, 1])
    return message


CALLS: dict[str, Callable[[GRPCInferenceServiceStub], Any]] = {
    "metadata": lambda stub: stub.ModelMetadata.future(pb.ModelMetadataRequest(name="ident"), timeout=LIMIT_S),
    "config": lambda stub: stub.ModelConfig.future(pb.ModelConfigRequest(name="ident"), timeout=LIMIT_S),
    "infer": lambda stub: stub.ModelInfer.future(asking(), timeout=LIMIT_S),
}


@pytest.fixture
def lookup(served: Any) -> ModelLookup:
    """The lookup of the model 'ident'."""
    made = served.core.lookups["ident"] = ModelLookup()
    return made


@pytest.fixture
def stub(channel: grpc.Channel) -> GRPCInferenceServiceStub:
    return GRPCInferenceServiceStub(channel)


def wait_for(served: Any, lookup: ModelLookup, waiting: int) -> None:
    wait_until(lambda: served.do(lambda: repr(lookup)) == f"<ModelLookup waiting={waiting}>", "the wait", limit_s=10)


def end(served: Any, lookup: ModelLookup, found: Any) -> None:
    served.do(lambda: lookup.end(found))


@pytest.mark.parametrize("name", CALLS)
def test_the_answer_is_the_same_once_the_model_is_known(served: Any, stub: Any, lookup: ModelLookup, name: str) -> None:
    late = CALLS[name](stub)
    wait_for(served, lookup, 1)
    assert stub.ServerLive(pb.ServerLiveRequest(), timeout=LIMIT_S).live, "others on the connection do not wait"
    end(served, lookup, served.core.views["ident"])
    served.core.lookups.clear()
    assert late.result(LIMIT_S) == CALLS[name](stub).result(LIMIT_S)


@pytest.mark.parametrize("name", CALLS)
def test_the_reason_why_there_is_no_model_is_the_status(served: Any, stub: Any, lookup: ModelLookup, name: str) -> None:
    late = CALLS[name](stub)
    wait_for(served, lookup, 1)
    end(served, lookup, UNKNOWN)
    assert (late.code(), late.details()) == (grpc.StatusCode.NOT_FOUND, UNKNOWN.message)


@pytest.mark.parametrize("name", CALLS)
def test_a_client_that_leaves_ends_its_wait(served: Any, stub: Any, lookup: ModelLookup, name: str) -> None:
    late = CALLS[name](stub)
    wait_for(served, lookup, 1)
    late.cancel()
    wait_for(served, lookup, 0)
    assert served.core.requests == []


def test_requests_of_a_stream_keep_their_order(served: Any, stub: Any, lookup: ModelLookup) -> None:
    """Also those of models that are known wait for the first one; another stream does not."""
    requests = [asking("1"), asking("2", "flat"), asking("3"), asking("4", "none"), asking("5", "flat")]
    requests[1].inputs[0].shape[:] = requests[4].inputs[0].shape[:] = [1]
    late = in_background(lambda: list(stub.ModelStreamInfer(iter(requests), timeout=LIMIT_S)))
    wait_for(served, lookup, 1)
    (other,) = stub.ModelStreamInfer(iter([requests[1]]), timeout=LIMIT_S)
    assert [each.id for each in served.core.requests] == ["2"]

    end(served, lookup, served.core.views["ident"])
    wait_for(served, lookup, 1)
    end(served, lookup, UNKNOWN)

    got = [(each.infer_response.id, each.error_message) for each in late.result(LIMIT_S)]
    no_model = "Request for unknown model: 'none' is not found"
    assert got == [("1", ""), ("2", ""), ("3", UNKNOWN.message), ("4", no_model), ("5", "")]
    assert other.infer_response.id == "2"


def test_the_end_of_a_stream_ends_the_wait_of_its_request(served: Any, stub: Any, lookup: ModelLookup) -> None:
    call = stub.ModelStreamInfer(iter([asking("1"), asking("2")]), timeout=LIMIT_S)
    wait_for(served, lookup, 1)
    call.cancel()
    wait_for(served, lookup, 0)
    assert served.core.requests == []


def test_a_deadline_ends_the_wait(served: Any, stub: Any, lookup: ModelLookup) -> None:
    late = stub.ModelInfer.future(asking(), timeout=0.3)
    assert late.exception(LIMIT_S).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_for(served, lookup, 0)
