"""Repositories with junk, with all kinds of links, and with files that change while they are served."""

import os
import random
import shutil
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from support.background import in_background
from support.calls import index, load, ones, scaled, unload
from support.config_seeds import SEEDS
from support.grpc_messages import message, values
from support.models import add_identity, add_scaled, save_onnx, write_config
from support.plugin import FaultyBackend
from support.served import Stage
from support.server import RunningServer, Start, wait_until


@pytest.fixture
def repository(repository: Path) -> Path:
    add_scaled(repository, "scaled", 2)
    return repository


def add_stamped(repository: Path, stamp: int) -> None:
    """Version 1 of `stamped`: IN plus the stamp, and the stamp itself in three more outputs."""
    names = ["OUT", *(f"STAMP{i}" for i in range(3))]
    save_onnx(
        repository / "stamped" / "1" / "new.onnx",
        [
            helper.make_node("Add", ["IN", "stamp"], ["OUT"]),
            helper.make_node("Sub", ["IN", "IN"], ["zero"]),
            *(helper.make_node("Add", ["zero", "stamp"], [name]) for name in names[1:]),
        ],
        [("IN", "FP32", ["N", 4])],
        [(name, "FP32", ["N", 4]) for name in names],
        [helper.make_tensor("stamp", TensorProto.FLOAT, [], np.array([stamp], np.float32))],
    ).rename(repository / "stamped" / "1" / "model.onnx")
    os.utime(repository / "stamped" / "1" / "model.onnx", ns=(stamp, stamp))


def reload_under_load(server: RunningServer, repository: Path, reloads: int) -> tuple[list[str], list[float]]:
    """Reload `stamped` under four clients. Returns their errors, and the duration of each request."""
    wrong: list[str] = []
    latencies: list[float] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            begun = time.monotonic()
            try:
                answer = server.post("/v2/models/stamped/infer", ones(4))
                outputs = {o["name"]: set(o["data"]) for o in answer.json["outputs"]}
                stamps = {value for name, data in outputs.items() for value in data if name != "OUT"}
                if len(stamps) != 1 or outputs["OUT"] != {1 + stamp for stamp in stamps}:
                    wrong.append(f"an answer of several loads: {outputs}")
            except Exception as error:
                wrong.append(repr(error))
            latencies.append(time.monotonic() - begun)

    callers = [threading.Thread(target=ask) for _ in range(4)]
    for caller in callers:
        caller.start()
    try:
        for stamp in range(2, reloads + 2):
            add_stamped(repository, stamp)
            assert load(server, "stamped") == (200, "")
            assert index(server)["stamped", "1"] == ("READY", "")
            assert server.get("/v2/models/stamped/ready").status == 200
    finally:
        stop.set()
        for caller in callers:
            caller.join()
    return wrong, latencies


@pytest.mark.parametrize("reloads", [10, pytest.param(50, marks=pytest.mark.load)])
def test_a_reload_fails_no_request_and_mixes_no_outputs_of_two_loads(stage: Stage, reloads: int) -> None:
    add_stamped(stage.repository, 1)
    assert load(stage.server, "stamped") == (200, "")
    wrong, latencies = reload_under_load(stage.server, stage.repository, reloads)
    assert wrong == []
    assert len(latencies) > 4 * reloads
    # The goal is 250 ms; the margin is for a shared machine.
    assert max(latencies) < 3, sorted(latencies)[-5:]


def test_a_failed_reload_keeps_the_old_model_and_reports_the_reason(
    start: Start, tmp_path: Path, repository: Path
) -> None:
    faulty = FaultyBackend.install(tmp_path)
    faulty.add_model(repository, "mine")
    arguments = ["--model-repository", repository, "--model-control-mode=explicit", "--load-model=*"]
    server = start(*arguments, environment=faulty.environment)
    config = (repository / "mine" / "config.pbtxt").read_text()

    def failed(text: str, status: int) -> None:
        answer = load(server, "mine")
        assert (answer[0], text in answer[1]) == (status, True), answer
        state, reason = index(server)["mine", "1"]
        assert (state, reason[:46], text in reason) == ("READY", "reload failed, the loaded one keeps serving: I", True)
        assert server.get("/v2/health/ready").status == 200
        assert scaled(server, "mine") == 1

    (repository / "mine" / "config.pbtxt").write_text("max_batch_size {")
    failed("mine/config.pbtxt:1", 500)
    faulty.add_model(repository, "mine", faults={"load": "ImportError"})
    failed("ImportError: as the test wants it", 400)
    faulty.add_model(repository, "mine", faults={"create": "RuntimeError"})
    failed("RuntimeError: as the test wants it", 400)
    shutil.rmtree(repository / "mine")
    failed("there is no directory 'mine'", 500)
    (repository / "mine" / "1").mkdir(parents=True)
    (repository / "mine" / "config.pbtxt").write_text(config)
    assert load(server, "mine") == (200, "")
    assert index(server)["mine", "1"] == ("READY", "")


def test_requests_in_flight_outlive_the_unload(stage: Stage) -> None:
    server = stage.server
    slow = 'parameters { key: "execute_delay_ms" value { string_value: "700" } }'
    add_identity(stage.repository, "slow", dims="4", max_batch_size=1, extra=slow)
    assert load(server, "slow") == (200, "")
    calls = [in_background(lambda: scaled(server, "slow")) for _ in range(3)]
    busy = 'halimede_executing_requests{model="slow",version="1"} '
    wait_until(lambda: f"{busy}1\n" in server.metrics(), "the first to run", server)
    wait_until(lambda: 'nv_inference_pending_request_count{model="slow",version="1"} 2\n' in server.metrics(), "queue")
    assert server.post("/v2/repository/models/slow/unload").status == 200
    answer = server.post("/v2/models/slow/infer", ones(4))
    assert (answer.status, answer.error) == (404, "Request for unknown model: 'slow' has no available versions")
    assert index(server)["slow", "1"] == ("UNLOADING", "")
    assert [call.result(30) for call in calls] == [1, 1, 1]
    wait_until(lambda: index(server)["slow", "1"] == ("UNAVAILABLE", "unloaded"), "the unload", server)


def test_junk_is_ignored_with_one_warning_each(start: Start, repository: Path) -> None:
    junk = {
        "nowhere": "it is a link that leads nowhere",
        "loop": "it is a loop of links",
        "README.md": "it is not a directory",
        "empty": "there is neither a config.pbtxt nor a version directory, such as '1', in it",
    }
    (repository / "nowhere").symlink_to(repository / "not there")
    (repository / "loop").symlink_to(repository / "loop")
    (repository / "README.md").write_text("Our models.")
    (repository / "empty").mkdir()
    add_scaled(repository, "a..b", 3)
    for name in (".git", "lost+found", "..data", "__MACOSX"):
        (repository / name).mkdir()
    versions = {
        "02": "a version has no leading zeros",
        "-1": "a version is a decimal number, at least 1",
        "99999999999999999999": f"a version is at most {2**63 - 1}",
        "x": "a version is a decimal number, at least 1",
    }
    for name in versions:
        (repository / "scaled" / name).mkdir()
    (repository / "scaled" / "4").symlink_to("5")
    (repository / "scaled" / "6").write_text("")
    server = start("--model-repository", repository, "--model-control-mode=explicit", "--load-model=*")

    assert index(server) == {("scaled", "1"): ("READY", ""), ("a..b", "1"): ("READY", "")}
    assert (scaled(server), scaled(server, "a..b")) == (2, 3)
    expected = [
        *(f"ignoring '{name}' in '{repository}': {why}" for name, why in junk.items()),
        *(f"ignoring version directory '{name}': {why}" for name, why in versions.items()),
        "ignoring version '4': it is a link that leads nowhere",
        "ignoring version '6': it is not a directory",
    ]
    for _ in range(3):
        index(server)
    os.utime(repository / "scaled" / "1" / "model.onnx", ns=(1, 1))
    assert load(server, "scaled") == (200, "")
    wait_until(lambda: server.log.count("successfully loaded 'scaled'") == 2, "the log to be written", server)
    assert [server.log.count(text) for text in expected] == [1] * len(expected), server.log
    assert server.log.count("ignoring") == len(expected)
    causes = {name: load(server, name) for name in ("nowhere", "loop", "README.md", "..data", ".git")}
    assert all(status in {400, 500} for status, _ in causes.values()), causes
    assert causes["loop"][1].endswith(" repository: 'loop': it is a loop of links")


def test_a_repository_that_disappears_does_not_interrupt_loaded_models(start: Start, repository: Path) -> None:
    server = start("--model-repository", repository, "--model-control-mode=explicit", "--load-model=*")
    repository.rename(repository.with_name("away"))
    assert (scaled(server), server.get("/v2/health/ready").status) == (2, 200)
    state, reason = index(server)["scaled", "1"]
    assert (state, reason) == ("READY", "")
    assert load(server, "scaled")[0] == 500
    assert (scaled(server), server.get("/v2/health/ready").status) == (2, 200)
    repository.with_name("away").rename(repository)
    assert load(server, "scaled") == (200, "")
    assert index(server)["scaled", "1"] == ("READY", "")


def test_a_name_in_two_repositories_is_an_error_in_the_index(start: Start, tmp_path: Path, repository: Path) -> None:
    other = tmp_path / "other"
    for path in (repository, other):
        add_scaled(path, "twice", 3)
    again = tmp_path / "again"
    again.symlink_to(repository)
    roots = [f"--model-repository={path}" for path in (repository, other, again)]
    server = start(*roots, "--model-control-mode=explicit", "--load-model=scaled")
    exactly = "model appears in two or more repositories"
    text = f"{exactly}: {repository}/twice, {other}/twice"
    assert index(server) == {("scaled", "1"): ("READY", ""), ("twice", ""): ("UNAVAILABLE", exactly)}
    assert index(server)["twice", ""] == ("UNAVAILABLE", exactly)
    wait_until(lambda: f"model 'twice': {text}" in server.log, "both paths in the log", server)
    assert server.log.count(text) == 1
    assert load(server, "twice") == (500, f"failed to load 'twice', failed to poll from model repository: {text}")
    assert index(server)["twice", ""] == ("UNAVAILABLE", exactly)
    assert server.get("/v2/health/ready").status == 200
    add_scaled(other, "scaled", 4)
    assert load(server, "scaled")[0] == 500
    assert scaled(server) == 2
    shutil.rmtree(other)
    assert load(server, "twice") == (200, "")
    assert scaled(server, "twice") == 3


def test_too_many_instances_are_refused_before_any_is_created(stage: Stage) -> None:
    for name, groups in [
        ("many", "{ kind: KIND_CPU count: 100000 }"),
        ("huge", "{ kind: KIND_CPU count: 2147483647 }, { kind: KIND_CPU count: 2147483647 }"),
        ("just", "{ kind: KIND_CPU count: 200 }, { kind: KIND_CPU count: 57 }"),
    ]:
        add_identity(stage.repository, name, extra=f"instance_group [ {groups} ]")
    for name in ("many", "huge", "just"):
        status, text = load(stage.server, name)
        assert (status, "256" in text) == (500, True), text


def test_a_mounted_config_map_is_served_and_followed_when_it_changes(stage: Stage, tmp_path: Path) -> None:
    """Kubernetes mounts a volume as links through `..data` to a dated directory, and replaces the link."""
    server, repository = stage.server, stage.repository
    weights = tmp_path / "weights"
    add_scaled(weights, "big", 5)
    mounted = repository / "mounted"

    def publish(date: str, labels: str) -> None:
        (mounted / date).mkdir(parents=True)
        (mounted / date / "config.pbtxt").write_text(
            'output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "labels.txt" } ]'
        )
        (mounted / date / "labels.txt").write_text(labels)
        (mounted / "..data_tmp").symlink_to(date)
        (mounted / "..data_tmp").rename(mounted / "..data")

    def top_label() -> str:
        outputs = [{"name": "OUT", "parameters": {"classification": 1}}]
        answer = server.post("/v2/models/mounted/infer", {**ones(4), "outputs": outputs})
        return answer.json["outputs"][0]["data"][0]

    publish("..2024_01", "first\n")
    for name in ("config.pbtxt", "labels.txt"):
        (mounted / name).symlink_to(f"..data/{name}")
    (mounted / "1").mkdir()
    (mounted / "1" / "model.onnx").symlink_to(weights / "big" / "1" / "model.onnx")
    (repository / "linked").symlink_to(weights / "big")
    log_start = len(server.log)
    assert load(server, "mounted") == load(server, "linked") == (200, "")
    assert (scaled(server, "mounted"), scaled(server, "linked")) == (5, 5)
    assert top_label() == "5.000000:0:first"
    publish("..2024_02", "second\n")
    assert load(server, "mounted") == (200, "")
    assert top_label() == "5.000000:0:second"
    assert unload(server, "linked") == 200
    # The last line: lines are written in order.
    wait_until(lambda: "successfully unloaded 'linked'" in server.log[log_start:], "the log to be written", server)
    assert "ignoring" not in server.log[log_start:]


def test_label_files_outside_the_repository_are_refused(stage: Stage, tmp_path: Path) -> None:
    server, repository = stage.server, stage.repository
    add_scaled(repository, "scaled", 2)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "token").write_text("top secret\n")
    (repository / "scaled" / "link.txt").symlink_to(tmp_path / "secret" / "token")
    (repository / "scaled" / "dir").symlink_to(tmp_path / "secret")
    (repository / "shared").mkdir()
    (repository / "shared" / "names.txt").write_text("zero\n")
    (repository / "scaled" / "shared.txt").symlink_to("../shared/names.txt")

    def with_labels(name: str) -> tuple[int, str]:
        write_config(
            repository / "scaled",
            f'output [ {{ name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "{name}" }} ]',
        )
        return load(server, "scaled")

    for name in ("link.txt", "dir/token"):
        status, text = with_labels(name)
        assert (status, "leads out of the repository" in text) == (500, True), text
    for name in ("../../secret/token", str(tmp_path / "secret" / "token"), "dir/../../shared/names.txt"):
        status, text = with_labels(name)
        assert (status, "'label_filename' of model output 'OUT' must not" in text) == (500, True), text
    assert with_labels("shared.txt") == (200, "")


def test_weights_are_read_only_from_the_directory_of_their_model(stage: Stage) -> None:
    """ONNX Runtime checks the paths in a model file. Older versions without the check fail this test."""
    server, repository = stage.server, stage.repository
    add_scaled(repository, "scaled", 2)
    values = np.full(4, 7, np.float32).tobytes()
    outside = stage.repository.parent / "outside.bin"
    outside.write_bytes(values)
    (repository / "scaled" / "1" / "inside.bin").write_bytes(values)

    def with_weights(location: str) -> tuple[int, str]:
        tensor = TensorProto(name="factor", data_type=TensorProto.FLOAT, dims=[4])
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", "0"), ("length", "16")):
            tensor.external_data.append(onnx.StringStringEntryProto(key=key, value=value))
        graph = helper.make_graph(
            [helper.make_node("Mul", ["IN", "factor"], ["OUT"])],
            "g",
            [helper.make_tensor_value_info("IN", TensorProto.FLOAT, ["N", 4])],
            [helper.make_tensor_value_info("OUT", TensorProto.FLOAT, ["N", 4])],
            [tensor],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        (repository / "scaled" / "1" / "model.onnx").write_bytes(model.SerializeToString())
        return load(server, "scaled")

    for location in ("../../../outside.bin", str(outside), "../1/../../../outside.bin"):
        status, text = with_weights(location)
        assert (status, "xternal data path" in text) == (400, True), text
    assert with_weights("inside.bin") == (200, "")
    assert scaled(server) == 7


def test_the_default_version_is_the_highest_that_is_ready(stage: Stage) -> None:
    server, repository = stage.server, stage.repository
    add_scaled(repository, "versions", 2)
    assert load(server, "versions") == (200, "")
    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def default() -> tuple[str, float]:
            answer = stub.ModelInfer(message("versions", columns=4), timeout=30)
            assert scaled(server, "versions") == values(answer)[0]
            return answer.model_version, values(answer)[0]

        (repository / "versions" / "config.pbtxt").write_text("version_policy { all { } }")
        assert default() == ("1", 2.0)
        add_scaled(repository, "versions", 10, version=10)
        add_scaled(repository, "versions", 9, version=9)
        assert load(server, "versions") == (200, "")
        assert default() == ("10", 10.0)
        (repository / "versions" / "10").rename(repository / "ten")
        assert load(server, "versions") == (200, "")
        assert default() == ("9", 9.0)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(pb.ModelInferRequest(model_name="versions", model_version="10"), timeout=30)
        assert caught.value.details().startswith("Request for unknown model: 'versions' version 10 is not ")
        assert scaled(server, "versions", version="1") == 2.0


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


def test_damaged_configurations_are_refused_with_a_place_or_served(stage: Stage) -> None:
    server, repository = stage.server, stage.repository
    add_scaled(repository, "damaged", 3)
    good = b"""
        max_batch_size: 8 instance_group { kind: KIND_CPU count: 2 } dynamic_batching { preferred_batch_size: [ 2, 4 ] }
        input { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] }
        output { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] }
    """
    seeds = [*SEEDS.values(), *[good] * len(SEEDS)]
    logged = len(server.log)
    chance = random.Random(1)
    served = placed = 0
    for _ in range(300):
        (repository / "damaged" / "config.pbtxt").write_bytes(damaged(chance, seeds))
        status, text = load(server, "damaged")
        assert status in {200, 400, 500}, text
        assert status == 200 or 0 < len(text) < 32_000
        served += status == 200
        placed += "damaged/config.pbtxt:" in text
    assert served > 20
    assert placed > 100
    assert server.get("/v2/health/ready").status == 200
    assert "Traceback" not in server.log[logged:]
