"""Faults of a repository during service, over gRPC."""

import os
import random
from pathlib import Path

import grpc
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from support.background import in_background
from support.calls import executing, index, load, ones, scaled
from support.config_seeds import SEEDS
from support.grpc_messages import message, values
from support.models import ONE, add_identity, add_scaled, delay
from support.plugin import FaultyBackend
from support.server import RunningServer, Start, wait_until


@pytest.fixture
def explicit(start: Start, repository: Path) -> RunningServer:
    add_scaled(repository, "scaled", 2)
    return start("--model-repository", repository, "--model-control-mode=explicit", "--load-model=scaled")


def test_a_reload_over_grpc_fails_no_request(explicit: RunningServer, repository: Path) -> None:
    seen: list[list[float] | str] = []
    is_over = False

    def ask() -> None:
        with grpc.insecure_channel(explicit.grpc_url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            while not is_over:
                try:
                    seen.append(values(stub.ModelInfer(message("scaled", columns=4), timeout=30)))
                except grpc.RpcError as error:
                    seen.append(repr(error))

    callers = [in_background(ask) for _ in range(3)]
    with grpcclient.InferenceServerClient(explicit.grpc_url) as client:
        for factor in range(3, 13):
            add_scaled(repository, "scaled", factor)
            os.utime(repository / "scaled" / "1" / "model.onnx", ns=(factor, factor))
            before = len(seen)
            client.load_model("scaled")
            assert client.is_model_ready("scaled")
            wait_until(lambda before=before: len(seen) >= before + 6, "answers of each caller", explicit)
    is_over = True
    for caller in callers:
        caller.result(30)
    assert [answer for answer in seen if isinstance(answer, str)] == []
    assert all(len(set(answer)) == 1 for answer in seen), "an answer of two loads"
    # Of the six answers after each load, at most one per client was requested before it.
    assert {answer[0] for answer in seen} >= {float(factor) for factor in range(3, 13)}


def test_a_failed_reload_and_an_unload_over_grpc(explicit: RunningServer, repository: Path) -> None:
    with (
        grpcclient.InferenceServerClient(explicit.grpc_url) as client,
        grpc.insecure_channel(explicit.grpc_url) as channel,
    ):
        (repository / "scaled" / "2").mkdir()
        (repository / "scaled" / "2" / "model.onnx").write_bytes(b"broken")
        text = "load failed for model 'scaled': version 2 is at UNAVAILABLE state: "
        with pytest.raises(InferenceServerException, match=text) as caught:
            client.load_model("scaled")
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        assert caught.value.message() == load(explicit, "scaled")[1]
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert values(stub.ModelInfer(message("scaled", columns=4), timeout=30)) == [2.0] * 4
        add_identity(repository, "slow", extra=f"{ONE} {delay(800)}")
        client.load_model("slow")
        running = [stub.ModelInfer.future(message("slow"), timeout=30) for _ in range(2)]
        wait_until(lambda: executing(explicit, "slow") == 1, "the execution", explicit)
        client.unload_model("slow")
        with pytest.raises(grpc.RpcError) as refused:
            stub.ModelInfer(message("slow"), timeout=30)
        assert (refused.value.code(), refused.value.details()) == (
            grpc.StatusCode.NOT_FOUND,
            "Request for unknown model: 'slow' has no available versions",
        )
        assert [values(call.result(30)) for call in running] == [[1.0] * 16] * 2
        wait_until(lambda: index(explicit)["slow", "1"] == ("UNAVAILABLE", "unloaded"), "the unload", explicit)


def test_the_default_version_is_the_highest_that_is_ready(explicit: RunningServer, repository: Path) -> None:
    with grpc.insecure_channel(explicit.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def default() -> tuple[str, float]:
            answer = stub.ModelInfer(message("scaled", columns=4), timeout=30)
            assert scaled(explicit) == values(answer)[0]
            return answer.model_version, values(answer)[0]

        (repository / "scaled" / "config.pbtxt").write_text("version_policy { all { } }")
        assert default() == ("1", 2.0)
        add_scaled(repository, "scaled", 10, version=10)
        add_scaled(repository, "scaled", 9, version=9)
        assert load(explicit, "scaled") == (200, "")
        assert default() == ("10", 10.0)
        (repository / "scaled" / "10").rename(repository / "ten")
        assert load(explicit, "scaled") == (200, "")
        assert default() == ("9", 9.0)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(pb.ModelInferRequest(model_name="scaled", model_version="10"), timeout=30)
        assert caught.value.details().startswith("Request for unknown model: 'scaled' version 10 is not ")
        assert scaled(explicit, version="1") == 2.0


def test_output_shapes_may_differ_from_the_configuration(start: Start, tmp_path: Path, repository: Path) -> None:
    """As in Triton, except for the rows of a batch, by which it is split into answers."""
    faulty = FaultyBackend.install(tmp_path)
    faulty.add_model(
        repository, "wide", faults={"run": "return {'OUT': np.ones((len(inputs['IN']), 2, 3), np.float32)}"}
    )
    faulty.add_model(repository, "rows", faults={"run": "return {'OUT': np.ones((7, 4), np.float32)}"})
    server = start("--model-repository", repository, environment=dict(faulty.environment))
    (output,) = server.post("/v2/models/wide/infer", ones(4)).json["outputs"]
    assert (output["shape"], output["data"]) == ([1, 2, 3], [1.0] * 6)
    answer = server.post("/v2/models/rows/infer", ones(4))
    assert (answer.status, "'OUT'" in answer.error) == (500, True)
    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert list(stub.ModelInfer(message("wide", columns=4), timeout=30).outputs[0].shape) == [1, 2, 3]
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(message("rows", columns=4), timeout=30)
        assert caught.value.code() is grpc.StatusCode.INTERNAL


def damaged(chance: random.Random, seeds: list[bytes]) -> bytes:
    """One of the seeds with some bytes changed, removed or inserted from another."""
    text = bytearray(chance.choice(seeds))
    for _ in range(chance.randrange(4)):
        at = chance.randrange(len(text) + 1)
        other = chance.choice(seeds)
        begin = chance.randrange(len(other))
        text[at : at + chance.choice([0, 0, 1, 4, 30])] = chance.choice(
            [b"", bytes([chance.randrange(256)]), other[begin : begin + chance.randrange(40)]]
        )
    return bytes(text)


def test_damaged_configurations_are_refused_with_a_place_or_served(explicit: RunningServer, repository: Path) -> None:
    add_scaled(repository, "damaged", 3)
    good = b"""
        max_batch_size: 8 instance_group { kind: KIND_CPU count: 2 } dynamic_batching { preferred_batch_size: [ 2, 4 ] }
        input { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] }
        output { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] }
    """
    seeds = [*SEEDS.values(), *[good] * len(SEEDS)]
    chance = random.Random(1)
    served = placed = 0
    for _ in range(300):
        (repository / "damaged" / "config.pbtxt").write_bytes(damaged(chance, seeds))
        status, text = load(explicit, "damaged")
        assert status in {200, 400, 500}, text
        assert status == 200 or 0 < len(text) < 32_000
        served += status == 200
        placed += "damaged/config.pbtxt:" in text
    assert served > 20
    assert placed > 100
    assert scaled(explicit) == 2
    assert explicit.get("/v2/health/ready").status == 200
    assert "Traceback" not in explicit.log
