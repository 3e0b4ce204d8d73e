"""Restricted protocols: every method of the running server's reflection, with every category's secret."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from halimede.core.types import ApiCategory
from halimede.core.wire.protocol import POOL, message_class
from support.models import add_identity
from support.server import RunningServer, serving, start_server

REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
ReflectionRequest = message_class("grpc.reflection.v1.ServerReflectionRequest")
ReflectionResponse = message_class("grpc.reflection.v1.ServerReflectionResponse")

# Written by hand, not read from the server's table.
CATEGORIES = {
    "ServerLive": "health",
    "ServerReady": "health",
    "ModelReady": "health",
    "Check": "health",
    "Watch": "health",
    "ServerMetadata": "metadata",
    "ModelMetadata": "metadata",
    "ServerReflectionInfo": "metadata",
    "ModelInfer": "inference",
    "ModelStreamInfer": "inference",
    "SystemSharedMemoryStatus": "shared-memory",
    "SystemSharedMemoryRegister": "shared-memory",
    "SystemSharedMemoryUnregister": "shared-memory",
    "CudaSharedMemoryStatus": "shared-memory",
    "CudaSharedMemoryRegister": "shared-memory",
    "CudaSharedMemoryUnregister": "shared-memory",
    "ModelConfig": "model-config",
    "RepositoryIndex": "model-repository",
    "RepositoryModelLoad": "model-repository",
    "RepositoryModelUnload": "model-repository",
    "ModelStatistics": "statistics",
    "TraceSetting": "trace",
    "LogSettings": "logging",
}


def header(category: str) -> tuple[str, str]:
    return (f"triton-grpc-protocol-key-{category}", f"secret of {category}")


@pytest.fixture(scope="module")
def restricted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with a different secret for each category."""
    models = tmp_path_factory.mktemp("models")
    add_identity(models, "ident")
    flags = [f"--grpc-restricted-protocol={each.value}:key-{each.value}=secret of {each.value}" for each in ApiCategory]
    with serving(tmp_path_factory.mktemp("log"), ["--model-repository", models, *flags]) as running:
        yield running


def ask(channel: grpc.Channel, method: str, metadata: list[tuple[str, str]]) -> tuple[grpc.StatusCode, str]:
    """The call's outcome; OK at the first answer. On the wire, every kind of call is a stream."""
    call = channel.stream_stream(method)(iter([b""]), metadata=metadata, timeout=20)
    try:
        next(call, None)
    except grpc.RpcError:
        return call.code(), call.details()
    call.cancel()
    return grpc.StatusCode.OK, ""


def served_methods(channel: grpc.Channel) -> list[str]:
    question = ReflectionRequest(list_services="")
    call = channel.stream_stream(
        REFLECTION,
        request_serializer=ReflectionRequest.SerializeToString,
        response_deserializer=ReflectionResponse.FromString,
    )
    (answer,) = call(iter([question]), metadata=[header("metadata")], timeout=20)
    names = [service.name for service in answer.list_services_response.service]
    return [f"/{name}/{method.name}" for name in names for method in POOL.FindServiceByName(name).methods]


def test_every_method_requires_only_the_secret_of_its_category(restricted: RunningServer) -> None:
    with grpc.insecure_channel(restricted.grpc_url) as channel:
        methods = served_methods(channel)
        assert len(methods) == 20 + 2 + 2
        for method in methods:
            own = CATEGORIES[method.rpartition("/")[2]]
            refusal = (
                grpc.StatusCode.UNAVAILABLE,
                f"This protocol is restricted, expecting header '{header(own)[0]}'",
            )
            others = [header(each.value) for each in ApiCategory if each.value != own]
            name, value = header(own)
            for metadata in (
                *([], *([other] for other in others), others),
                *([(name, "")], [(name, value[:-1])], [(name, f"{value} ")], [(name, value.upper())]),
                [(name.removeprefix("triton-grpc-protocol-"), value)],
            ):
                assert ask(channel, method, metadata) == refusal, (method, metadata)
            assert not ask(channel, method, [header(own)])[1].startswith("This protocol is restricted"), method


def test_an_unknown_method_is_unimplemented_despite_restrictions(restricted: RunningServer) -> None:
    with grpc.insecure_channel(restricted.grpc_url) as channel:
        code, _ = ask(channel, "/inference.GRPCInferenceService/Nope", [])
    assert code is grpc.StatusCode.UNIMPLEMENTED


def test_tritonclient_sends_the_secret_and_other_categories_stay_open(tmp_path: Path) -> None:
    add_identity(tmp_path / "models", "ident")
    flag = "--grpc-restricted-protocol=model-repository,model-config:admin-key=sesame"
    server = start_server(tmp_path, ["--model-repository", tmp_path / "models", flag])
    try:
        with triton.InferenceServerClient(server.grpc_url) as client:
            assert client.is_server_ready()
            assert client.get_model_metadata("ident").name == "ident"
            with pytest.raises(InferenceServerException) as caught:
                client.get_model_config("ident")
            assert caught.value.message() == (
                "This protocol is restricted, expecting header 'triton-grpc-protocol-admin-key'"
            )
            headers = {"triton-grpc-protocol-admin-key": "sesame"}
            assert client.get_model_config("ident", headers=headers).config.name == "ident"
            assert len(client.get_model_repository_index(headers=headers).models) == 1
    finally:
        assert server.stop() == 0
