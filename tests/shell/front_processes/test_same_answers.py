"""A client cannot tell a server with two front-end processes from one with its own front end."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from support.calls import ONES, ONES_JSON
from support.front_ends import MAX_TRIES, TWO, Connection, connect, connections_to_each, front_ends, open_connections
from support.models import add_identity, add_scaled, add_simple, add_simple_string
from support.served import add_python
from support.server import RunningServer, start_server

LONG = "x" * 100_000
LARGE = {"inputs": [{"name": "IN", "shape": [1, 100], "datatype": "FP32", "data": [0.5] * 100}]}
WHO = """
parameters = json.loads(requests[0].parameters())
return [answer(requests[0], **{key: value for key, value in parameters.items()})]
"""


@dataclass
class Both:
    alone: RunningServer
    two: RunningServer


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    repository = tmp_path_factory.mktemp("models")
    add_identity(repository, "quick")
    add_identity(repository, "wide", dims="-1")
    add_identity(repository, "text", datatype="BYTES", dims="-1")
    add_simple(repository)
    add_simple_string(repository)
    add_scaled(repository, "scaled", 2.0, version=1)
    add_scaled(repository, "scaled", 3.0, version=3)
    (repository / "scaled" / "config.pbtxt").write_text("version_policy { all { } }")
    add_python(repository, "told", WHO)
    add_python(repository, "many", "pass", decoupled=True)
    add_python(repository, "failing", "raise pb_utils.TritonModelException('no luck')")
    (repository / "broken").mkdir()
    (repository / "broken" / "config.pbtxt").write_text('backend: "identity" nonsense')
    arguments: list[str | Path] = [
        *("--model-repository", repository, "--strict-readiness=false", "--exit-on-error=false"),
        *("--http-header-forward-pattern=x-.*", "--grpc-header-forward-pattern=x-.*"),
        *("--http-restricted-api=trace:key=secret", "--grpc-restricted-protocol=trace:key=secret"),
    ]
    log = tmp_path_factory.mktemp("log")
    alone = start_server(log, ["--frontend-processes=1", *arguments])
    two = start_server(log, [TWO, *arguments])
    yield Both(alone, two)
    for server in (alone, two):
        assert server.process.poll() is None, server.log
        assert server.stop() == 0, server.log


@pytest.fixture(scope="module")
def alone(both: Both) -> Iterator[Connection]:
    connection = connect(both.alone)
    yield connection
    connection.http.close()


@pytest.fixture(scope="module")
def fronts(both: Both) -> Iterator[list[Connection]]:
    with connections_to_each(both.two) as found:
        yield found


def infer(model: str, document: object) -> tuple[str, str, bytes]:
    return "POST", f"/v2/models/{model}/infer", json.dumps(document).encode()


def with_fields(**fields: object) -> dict[str, object]:
    return ONES | fields


REQUESTS: dict[str, tuple[Any, ...]] = {
    "metadata": ("GET", "/v2"),
    "live": ("GET", "/v2/health/live"),
    "ready": ("GET", "/v2/health/ready"),
    "model": ("GET", "/v2/models/simple"),
    "versions": ("GET", "/v2/models/scaled"),
    "version": ("GET", "/v2/models/scaled/versions/1"),
    "version spelled": ("GET", "/v2/models/scaled/versions/003"),
    "version unknown": ("GET", "/v2/models/scaled/versions/2"),
    "version text": ("GET", "/v2/models/scaled/versions/two"),
    "version negative": ("GET", "/v2/models/scaled/versions/-1"),
    "config": ("GET", "/v2/models/simple/config"),
    "model ready": ("GET", "/v2/models/simple/ready"),
    "unknown": ("GET", "/v2/models/none"),
    "unknown name": ("GET", "/v2/models/%ff%00x"),
    "unknown ready": ("GET", "/v2/models/none/ready"),
    "unknown config": ("GET", "/v2/models/none/config"),
    "unknown statistics": ("GET", "/v2/models/none/stats"),
    "broken": ("GET", "/v2/models/broken"),
    "broken ready": ("GET", "/v2/models/broken/ready"),
    "index": ("POST", "/v2/repository/index"),
    "index ready": ("POST", "/v2/repository/index", b'{"ready": true}'),
    "load": ("POST", "/v2/repository/models/simple/load"),
    "unload": ("POST", "/v2/repository/models/simple/unload"),
    "trace": ("GET", "/v2/trace/setting"),
    "trace secret": ("GET", "/v2/trace/setting", b"", {"key": "secret"}),
    "logging": ("GET", "/v2/logging"),
    "no path": ("GET", "/v3"),
    "method": ("DELETE", "/v2"),
    "infer": infer("quick", ONES),
    "infer id": infer("quick", with_fields(id="größe ✓")),
    "infer long id": infer("quick", with_fields(id=LONG)),
    "infer surrogate": ("POST", "/v2/models/quick/infer", ONES_JSON.replace("{", '{"id": "\\ud800", ', 1).encode()),
    "infer unknown": infer("none", ONES),
    "infer broken": infer("broken", ONES),
    "infer version": ("POST", "/v2/models/quick/versions/2/infer", ONES_JSON.encode()),
    "infer decoupled": infer("many", LARGE),
    "bad JSON": ("POST", "/v2/models/quick/infer", b"{"),
    "no JSON": ("POST", "/v2/models/quick/infer", b""),
    "JSON list": ("POST", "/v2/models/quick/infer", b"[]"),
    "wrong shape": infer("quick", {"inputs": [ONES["inputs"][0] | {"shape": [1, 15]}]}),  # type: ignore[index]
    "wrong type": infer("quick", {"inputs": [ONES["inputs"][0] | {"datatype": "INT32"}]}),  # type: ignore[index]
    "wrong name": infer("quick", {"inputs": [ONES["inputs"][0] | {"name": "X"}]}),  # type: ignore[index]
    "no input": infer("quick", {"inputs": []}),
    "output": infer("quick", with_fields(outputs=[{"name": "OUT"}])),
    "binary output": infer("quick", with_fields(outputs=[{"name": "OUT", "parameters": {"binary_data": True}}])),
    "classification": infer("quick", with_fields(outputs=[{"name": "OUT", "parameters": {"classification": 2}}])),
    "unknown output": infer("quick", with_fields(outputs=[{"name": "NONE"}])),
    "priority": infer("quick", with_fields(parameters={"priority": 2**64 - 1})),
    "too large priority": infer("quick", with_fields(parameters={"priority": 2**64})),
    "negative priority": infer("quick", with_fields(parameters={"priority": -1})),
    "timeout": infer("quick", with_fields(parameters={"timeout": 2**63})),
    "too large timeout": infer("quick", with_fields(parameters={"timeout": 2**64})),
    "sequence": infer("quick", with_fields(parameters={"sequence_id": 2**64 - 1, "sequence_start": True})),
    "too large sequence": infer("quick", with_fields(parameters={"sequence_id": 2**64})),
    "negative sequence": infer("quick", with_fields(parameters={"sequence_id": -1})),
    "long sequence": infer("quick", with_fields(parameters={"sequence_id": LONG})),
    "text": infer(
        "text", {"inputs": [{"name": "IN", "shape": [1, 3], "datatype": "BYTES", "data": ["", "größe ✓", LONG]}]}
    ),
    "no element": infer("text", {"inputs": [{"name": "IN", "shape": [1, 0], "datatype": "BYTES", "data": []}]}),
    "parameters": infer("told", LARGE | {"parameters": {"a": 1, "b": "größe ✓", "c": True, "d": 0.5}}),
    "long parameters": infer("told", LARGE | {"parameters": {"a": LONG, "b": ",[{" * 50_000}}),
    "invalid parameters": infer("told", LARGE | {"parameters": {"a": [1], "b": None, "c": {"d": 1}}}),
    "surrogate": ("POST", "/v2/models/told/infer", json.dumps(LARGE | {"parameters": {"\ud800": "\udfff"}}).encode()),
    "infinite": infer("told", LARGE | {"parameters": {"a": float("inf"), "b": 10**400}}),
    "forwarded": (*infer("told", LARGE), {"x-a": "1", "X-B": "two", "y-c": "3"}),
    "gzip": (*infer("quick", ONES), {"Accept-Encoding": "gzip"}),
    "generate nothing": ("POST", "/v2/models/quick/generate", b"{}"),
    "stream nothing": ("POST", "/v2/models/wide/generate_stream", b"{}"),
    "stream wrong": ("POST", "/v2/models/quick/generate_stream", b'{"IN": [1, 2, 3]}'),
    "stream failing": ("POST", "/v2/models/failing/generate_stream", b'{"IN": 1}'),
    "events of nothing": (*infer("wide", {"inputs": []}), {"Accept": "text/event-stream"}),
    "generate": ("POST", "/v2/models/quick/generate", b'{"IN": 1.0}'),
    "generate stream": ("POST", "/v2/models/wide/generate_stream", b'{"IN": [1.0, 2.0]}'),
}
VOLATILE = {"date", "server"}


@pytest.mark.parametrize("name", REQUESTS)
def test_http_answers_are_the_same(alone: Connection, fronts: list[Connection], name: str):
    method, path, *rest = REQUESTS[name]
    expected = alone.request(method, path, *rest)
    for front in fronts:
        got = front.request(method, path, *rest)
        assert (got.status, got.body) == (expected.status, expected.body)
        assert {k: v for k, v in got.headers.items() if k not in VOLATILE} == {
            k: v for k, v in expected.headers.items() if k not in VOLATILE
        }


@pytest.mark.parametrize("path", ["/v2/models/stats", "/v2/models/scaled/stats", "/v2/models/scaled/versions/3/stats"])
def test_statistics_have_the_same_fields(alone: Connection, fronts: list[Connection], path: str):
    def fields(connection: Connection) -> tuple[int, bytes]:
        answer = connection.get(path)
        return answer.status, re.sub(rb"\d+", b"0", answer.body)

    assert [fields(front) for front in fronts] == [fields(alone)] * 2


def test_statistics_count_the_requests_of_all_processes(fronts: list[Connection]):
    def count(connection: Connection) -> int:
        document: Any = connection.get("/v2/models/quick/stats").json
        return int(document["model_stats"][0]["inference_stats"]["success"]["count"])

    before = count(fronts[0])
    for front in fronts:
        assert front.post("/v2/models/quick/infer", ONES_JSON).status == 200
    assert [count(front) for front in fronts] == [before + 2] * 2


def ones(**fields: Any) -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name="quick", **fields)
    made.inputs.add(name="IN", datatype="FP32", shape=[1, 16]).contents.fp32_contents.extend([1.0] * 16)
    return made


def told(**parameters: Any) -> pb.ModelInferRequest:
    made = ones()
    made.model_name = "told"
    for name, value in parameters.items():
        made.parameters[name].CopyFrom(value)
    return made


CALLS: dict[str, tuple[Any, ...]] = {
    "live": ("ServerLive", pb.ServerLiveRequest()),
    "ready": ("ServerReady", pb.ServerReadyRequest()),
    "metadata": ("ServerMetadata", pb.ServerMetadataRequest()),
    "model": ("ModelMetadata", pb.ModelMetadataRequest(name="simple")),
    "unknown": ("ModelMetadata", pb.ModelMetadataRequest(name="none")),
    "broken": ("ModelMetadata", pb.ModelMetadataRequest(name="broken")),
    "version": ("ModelMetadata", pb.ModelMetadataRequest(name="scaled", version="2")),
    "model ready": ("ModelReady", pb.ModelReadyRequest(name="simple")),
    "unknown ready": ("ModelReady", pb.ModelReadyRequest(name="none")),
    "config": ("ModelConfig", pb.ModelConfigRequest(name="simple")),
    "index": ("RepositoryIndex", pb.RepositoryIndexRequest()),
    "load": ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="simple")),
    "unload": ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="simple")),
    "statistics": ("ModelStatistics", pb.ModelStatisticsRequest(name="none")),
    "trace": ("TraceSetting", pb.TraceSettingRequest()),
    "trace secret": ("TraceSetting", pb.TraceSettingRequest(), [("key", "secret")]),
    "logging": ("LogSettings", pb.LogSettingsRequest()),
    "infer": ("ModelInfer", ones(id="größe ✓")),
    "long id": ("ModelInfer", ones(id=LONG)),
    "infer unknown": ("ModelInfer", pb.ModelInferRequest(model_name="none")),
    "infer nothing": ("ModelInfer", pb.ModelInferRequest(model_name="quick")),
    "infer decoupled": ("ModelInfer", pb.ModelInferRequest(model_name="many")),
    "parameters": (
        "ModelInfer",
        told(
            a=pb.InferParameter(int64_param=1),
            b=pb.InferParameter(string_param="ü"),
            c=pb.InferParameter(bool_param=True),
        ),
    ),
    "long parameters": ("ModelInfer", told(a=pb.InferParameter(string_param=LONG))),
    "forwarded": ("ModelInfer", told(), [("x-a", "1"), ("y-b", "2")]),
    "negative priority": ("ModelInfer", told(priority=pb.InferParameter(int64_param=-1))),
    "negative sequence": ("ModelInfer", told(sequence_id=pb.InferParameter(int64_param=-1))),
}


def outcome(channel: grpc.Channel, method: str, request: Any, metadata: Any = ()) -> tuple[str, str, Any]:
    try:
        return "OK", "", getattr(GRPCInferenceServiceStub(channel), method)(request, metadata=metadata, timeout=30)
    except grpc.RpcError as error:
        return error.code().name, error.details(), None


@pytest.fixture(scope="module")
def channels(both: Both) -> Iterator[list[grpc.Channel]]:
    """The first to the server alone, the others to both processes of the other server."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    made = [grpc.insecure_channel(both.alone.grpc_url, options)]
    while len(made) < 7 or not all(open_connections(each, both.two.grpc_port) for each in front_ends(both.two)):
        assert len(made) < MAX_TRIES, "one front end accepts no gRPC connection"
        made.append(grpc.insecure_channel(both.two.grpc_url, options))
        grpc.channel_ready_future(made[-1]).result(30)
    yield made
    for each in made:
        each.close()


@pytest.mark.parametrize("name", CALLS)
def test_grpc_answers_are_the_same(channels: list[grpc.Channel], name: str):
    alone, *others = (outcome(channel, *CALLS[name]) for channel in channels)
    assert others == [alone] * len(others)


@pytest.mark.parametrize("name", ["", "scaled"])
def test_grpc_statistics_have_the_same_fields(channels: list[grpc.Channel], name: str):
    def fields(channel: grpc.Channel) -> str:
        code, _, answer = outcome(channel, "ModelStatistics", pb.ModelStatisticsRequest(name=name))
        assert code == "OK"
        # Numbers that are 0 are not sent.
        return "".join(
            f"{each.name} {each.version} {each.HasField('inference_stats')}\n" for each in answer.model_stats
        )

    alone, *others = map(fields, channels)
    assert others == [alone] * len(others)
    assert "scaled 3 True" in alone


def test_readiness_is_the_same_on_new_connections(both: Both):
    for server in (both.alone, both.two):
        for _ in range(4):
            assert server.get("/v2/health/ready").status == 200
