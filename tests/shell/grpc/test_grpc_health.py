"""grpc.health.v1 and server reflection, by raw messages."""

import time

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

from halimede.core.wire.protocol import message_class
from support.server import wait_until

HealthRequest = message_class("grpc.health.v1.HealthCheckRequest")
HealthResponse = message_class("grpc.health.v1.HealthCheckResponse")

SERVICES = [
    "inference.GRPCInferenceService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
]


def check(channel: grpc.Channel, service: str) -> int:
    rpc = channel.unary_unary("/grpc.health.v1.Health/Check")
    return HealthResponse.FromString(rpc(HealthRequest(service=service).SerializeToString(), timeout=20)).status


def watch(channel: grpc.Channel, service: str) -> grpc.Call:
    rpc = channel.unary_stream("/grpc.health.v1.Health/Watch", response_deserializer=HealthResponse.FromString)
    return rpc(HealthRequest(service=service).SerializeToString(), timeout=20)


@pytest.mark.parametrize("service", ["", "inference.GRPCInferenceService"])
def test_check_follows_readiness(served, channel, service: str) -> None:
    assert check(channel, service) == HealthResponse.SERVING
    served.core.is_up = False
    assert check(channel, service) == HealthResponse.NOT_SERVING


def test_check_of_an_unknown_service(channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        check(channel, "nope")
    assert (caught.value.code(), caught.value.details()) == (
        grpc.StatusCode.NOT_FOUND,
        "unknown service 'nope', expected one of ['', 'inference.GRPCInferenceService']",
    )


def test_watch_sends_the_status_and_its_changes(served, channel) -> None:
    watching = watch(channel, "")
    assert next(watching).status == HealthResponse.SERVING
    served.core.is_up = False
    assert next(watching).status == HealthResponse.NOT_SERVING
    served.core.is_up = True
    assert next(watching).status == HealthResponse.SERVING
    watching.cancel()


def test_many_watches_poll_as_often_as_one(served, channel) -> None:
    watching = [watch(channel, "") for _ in range(60)]
    assert {next(each).status for each in watching} == {HealthResponse.SERVING}
    before = served.core.looks
    wait_until(lambda: served.core.looks >= before + 4, "four more looks")
    # If each watch polled four times a second, four polls would happen within a few milliseconds.
    started = time.monotonic()
    wait_until(lambda: served.core.looks >= before + 8, "four more looks")
    assert time.monotonic() - started > 0.5
    served.core.is_up = False
    assert {next(each).status for each in watching} == {HealthResponse.NOT_SERVING}
    for each in watching:
        each.cancel()


def test_watch_of_an_unknown_service_stays_open(channel) -> None:
    watching = watch(channel, "nope")
    assert next(watching).status == HealthResponse.SERVICE_UNKNOWN
    assert watching.is_active()
    watching.cancel()


def test_watch_refuses_an_invalid_message(channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        next(channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\xff"))
    assert caught.value.code() is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(
    "path",
    [
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/inference.GRPCInferenceService/ServerLive",
        "/inference.GRPCInferenceService/RepositoryModelLoad",
    ],
)
def test_a_large_request_other_than_inference_is_refused_unread(channel, path: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        next(channel.unary_stream(path)(b"\x78\x01" * 40_000, timeout=20))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{path.rpartition('/')[2]}: the request has 80000 bytes, at most 65536 are taken" in caught.value.details()


def reflect(channel: grpc.Channel, version: str, *requests: dict) -> list:
    asking = message_class(f"grpc.reflection.{version}.ServerReflectionRequest")
    answering = message_class(f"grpc.reflection.{version}.ServerReflectionResponse")
    rpc = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=asking.SerializeToString,
        response_deserializer=answering.FromString,
    )
    return list(rpc(iter([asking(**request) for request in requests]), timeout=20))


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_lists_services_and_describes_them_completely(channel, version: str) -> None:
    listed, *described = reflect(
        channel, version, {"host": "h", "list_services": "*"}, *({"file_containing_symbol": name} for name in SERVICES)
    )
    assert (listed.valid_host, listed.original_request.list_services) == ("h", "*")
    assert [service.name for service in listed.list_services_response.service] == SERVICES
    for name, answer in zip(SERVICES, described, strict=True):
        pool = DescriptorPool()
        # A file comes before those that it imports.
        for raw in reversed(answer.file_descriptor_response.file_descriptor_proto):
            pool.Add(FileDescriptorProto.FromString(raw))
        assert len(pool.FindServiceByName(name).methods) > 0


def test_reflection_finds_files_messages_and_methods(channel) -> None:
    answers = reflect(
        channel,
        "v1",
        {"file_by_filename": "model_config.proto"},
        {"file_containing_symbol": "inference.ModelInferRequest.InferInputTensor"},
        {"file_containing_symbol": "inference.GRPCInferenceService.ModelInfer"},
    )
    names = [
        [FileDescriptorProto.FromString(raw).name for raw in answer.file_descriptor_response.file_descriptor_proto]
        for answer in answers
    ]
    both = ["grpc_service.proto", "model_config.proto"]
    assert names == [["model_config.proto"], both, both]


def test_reflection_reports_unknown_names_and_continues(channel) -> None:
    *missing, extensions, nothing = reflect(
        channel,
        "v1",
        {"file_by_filename": "nope.proto"},
        {"file_containing_symbol": "inference.Nope"},
        {"file_containing_extension": {"containing_type": "inference.ModelConfig", "extension_number": 7}},
        {"all_extension_numbers_of_type": "inference.Nope"},
        {"all_extension_numbers_of_type": "inference.ModelConfig"},
        {},
    )
    assert [answer.error_response.error_code for answer in missing] == [grpc.StatusCode.NOT_FOUND.value[0]] * 4
    assert "inference.Nope" in missing[1].error_response.error_message
    assert extensions.all_extension_numbers_response.base_type_name == "inference.ModelConfig"
    assert nothing.error_response.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


def test_reflection_refuses_an_invalid_message(channel) -> None:
    rpc = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    with pytest.raises(grpc.RpcError) as caught:
        list(rpc(iter([b"\xff"])))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
