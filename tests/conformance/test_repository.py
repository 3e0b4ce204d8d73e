"""Repositories and life cycle. Tests of what a server does when it starts have a server of their own."""

from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from support.calls import index, load, scaled
from support.models import add_identity, add_scaled, add_simple, write_config
from support.served import Stage, body, write_model
from support.server import Start, wait_until


def test_a_broken_model_does_not_stop_the_others(start: Start, repository: Path) -> None:
    add_simple(repository)
    add_scaled(repository, "scaled", 2)
    (repository / "broken" / "1").mkdir(parents=True)
    (repository / "broken" / "1" / "model.onnx").write_bytes(b"no onnx at all")
    server = start("--model-repository", repository, "--exit-on-error=false", "--strict-readiness=false")
    assert scaled(server) == 2
    states = index(server)
    assert states[("simple", "1")] == ("READY", "")
    state, reason = states[("broken", "1")]
    assert state == "UNAVAILABLE"
    assert reason.startswith("Internal: onnx runtime error 7: Load model from ")
    text = "failed to load 'broken' version 1: Internal: onnx runtime error 7: Load model from "
    wait_until(lambda: text in server.log, "the line of the log", server)
    assert server.get("/v2/models/broken/ready").status == 400
    assert server.stop() == 0


def test_strict_readiness_waits_for_every_model(start: Start, repository: Path) -> None:
    add_scaled(repository, "scaled", 2)
    write_config(repository / "broken", "nonsense_field: 1")
    (repository / "broken" / "1").mkdir()
    server = start("--model-repository", repository, "--exit-on-error=false", ready=False)
    wait_until(lambda: server.get("/v2/models/scaled/ready").status == 200, "the good model", server)
    answer = server.get("/v2/health/ready")
    assert (answer.status, answer.body) == (400, b"")
    assert server.get("/v2/health/live").status == 200
    wait_until(lambda: ("broken", "") in index(server), "the failure", server)
    state, reason = index(server)[("broken", "")]
    assert state == "UNAVAILABLE"
    assert reason.startswith("broken/config.pbtxt:1:1: nonsense_field: unknown field")


def test_exit_on_error_is_the_default(start: Start, repository: Path) -> None:
    write_config(repository / "broken", "nonsense_field: 1\nmax_batch_size: x")
    (repository / "broken" / "1").mkdir()
    server = start("--model-repository", repository, ready=False)
    assert server.process.wait(20) == 1
    assert "failed to load all models" in server.log
    assert "1:1" in server.log
    assert "2:17" in server.log


def test_a_slow_model_does_not_delay_the_others(start: Start, repository: Path) -> None:
    add_scaled(repository, "scaled", 2)
    for number in range(6):
        add_identity(
            repository, f"slow{number}", extra='parameters { key: "creation_delay_sec" value { string_value: "600" } }'
        )
    server = start("--model-repository", repository, ready=False)
    wait_until(lambda: server.get("/v2/models/scaled/ready").status == 200, "the quick model", server)
    assert scaled(server) == 2
    assert server.get("/v2/health/ready").status == 400
    assert index(server)[("slow0", "1")][0] == "LOADING"
    assert server.stop(5) == 0


def test_versions(stage: Stage) -> None:
    server = stage.server
    for version in (1, 2, 11):
        add_scaled(stage.repository, "versioned", version, version=version)
    for junk in ("02", "x", "-1", "0"):
        (stage.repository / "versioned" / junk).mkdir()
    write_config(stage.repository / "versioned", "version_policy { latest { num_versions: 2 } }")
    assert load(server, "versioned") == (200, "")
    assert server.get("/v2/models/versioned").json["versions"] == ["2", "11"]
    assert (scaled(server, "versioned"), scaled(server, "versioned", "2")) == (11, 2)
    assert server.post("/v2/models/versioned/versions/1/infer", b"{}").status == 404


def test_invalid_model_names_are_refused(stage: Stage) -> None:
    server = stage.server
    empty = "Model name cannot be empty. Please enter a valid name to deploy."
    outside = "invalid model name '{}', model name must not contain path traversal characters"
    texts = {"": empty, " \t": empty, **{name: outside.format(name) for name in ("..", " .. ", "a/b", "../../etc")}}
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        for name, text in texts.items():
            for call in (client.load_model, client.unload_model) if text == empty else (client.load_model,):
                with pytest.raises(InferenceServerException) as caught:
                    call(name)
                assert (caught.value.status(), caught.value.message()) == ("StatusCode.INVALID_ARGUMENT", text)
            if text != empty:
                # The model is unknown.
                client.unload_model(name)
                assert server.post(f"/v2/repository/models/{quote(name, safe='')}/unload").status == 200
            if name:
                answer = server.post(f"/v2/repository/models/{quote(name, safe='')}/load")
                assert (answer.status, answer.error) == (400, text)


def test_readiness_over_grpc_of_an_unknown_model_is_false_not_an_error(stage: Stage) -> None:
    server = stage.server
    add_scaled(stage.repository, "scaled", 2)

    with grpcclient.InferenceServerClient(server.grpc_url) as client:

        def ready() -> list[bool]:
            return [client.is_model_ready(*each) for each in (("scaled", ""), ("scaled", "1"), ("scaled", "2"))]

        assert ready() == [False, False, False]
        client.load_model("scaled")
        assert ready() == [True, True, False]
        client.unload_model("scaled")
        assert ready() == [False, False, False]
        assert not client.is_model_ready("never")
    assert server.get("/v2/models/never/ready").status == 404


def test_explicit_control(stage: Stage) -> None:
    server = stage.server
    add_scaled(stage.repository, "controlled", 5)
    assert server.post("/v2/models/bystander/infer", body(1)).status == 200
    assert index(server)["bystander", "1"] == ("READY", "")
    assert stage.index() == {("controlled", ""): ("", "")}
    assert server.get("/v2/models/controlled/ready").status == 404
    assert server.post("/v2/repository/models/controlled/load").status == 200
    assert scaled(server, "controlled") == 5
    assert (
        server.post("/v2/repository/models/controlled/unload", {"parameters": {"unload_dependents": True}}).status
        == 200
    )
    answer = server.post("/v2/models/controlled/infer", b"{}")
    assert (answer.status, answer.error) == (404, "Request for unknown model: 'controlled' has no available versions")
    wait_until(lambda: index(server)[("controlled", "1")] == ("UNAVAILABLE", "unloaded"), "the unload", server)
    assert server.get("/v2/health/ready").status == 200
    assert server.post("/v2/repository/models/never/unload").status == 200
    ready = server.post("/v2/repository/index", {"ready": True}).json
    assert [(each["name"], each["version"], each["state"]) for each in ready] == [("bystander", "1", "READY")]


def test_a_failed_load_names_its_root_cause(stage: Stage) -> None:
    server, repository = stage.server, stage.repository
    write_config(
        repository / "bad_config", 'max_batch_size: 4\ninput [ { name: "a" dims: [ 1 ] data_tipe: TYPE_FP32 } ]'
    )
    (repository / "bad_config" / "1").mkdir()
    (repository / "bad_file" / "1").mkdir(parents=True)
    (repository / "bad_file" / "1" / "model.onnx").write_bytes(b"garbage")
    missing = server.post("/v2/repository/models/missing/load")
    assert missing.status == 500
    assert missing.error.startswith(
        "failed to load 'missing', failed to poll from model repository: there is no directory"
    )
    config = server.post("/v2/repository/models/bad_config/load")
    assert config.status == 500
    assert "config.pbtxt:2:33" in config.error
    assert "data_tipe" in config.error
    file = server.post("/v2/repository/models/bad_file/load")
    assert file.status == 400
    assert file.error.startswith(
        "load failed for model 'bad_file': version 1 is at UNAVAILABLE state: Internal: onnx runtime error 7: Load model "
    )
    assert file.error.endswith(";\n")
    for name in ("..", "a%2Fb", "%00"):
        assert server.post(f"/v2/repository/models/{name}/load").status in {400, 404}


def test_the_error_of_a_failed_load_has_the_fix(stage: Stage) -> None:
    server, repository = stage.server, stage.repository
    (repository / "flat").mkdir()
    (repository / "flat" / "model.onnx").write_bytes(b"")
    add_scaled(repository, "scaled", 1)

    def cause(model: str, status: int = 500) -> str:
        answer = server.post(f"/v2/repository/models/{model}/load")
        poll = f"failed to load '{model}', failed to poll from model repository: "
        before = poll if status == 500 else f"load failed for model '{model}': "
        assert (answer.status, answer.error[: len(before)]) == (status, before)
        return answer.error.removeprefix(before)

    none = "at least one version must be available under the version policy of model"
    assert cause("flat", 400) == f"{none} 'flat': there is no version directory, such as '{repository}/flat/1'"
    write_config(repository / "bare", 'backend: "identity"')
    (repository / "bare" / "1").mkdir()
    assert cause("bare").startswith("bare/config.pbtxt: model configuration must contain at least one input, none were")
    write_config(repository / "scaled", "version_policy { specific { versions: 7 } }")
    assert cause("scaled", 400) == f"{none} 'scaled': there are 1"
    write_config(repository / "alien", 'backend: "nope" input [ { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] } ]')
    (repository / "alien" / "1").mkdir()
    assert "backend 'nope'" in cause("alien", 400)
    assert index(server)[("alien", "1")][0] == "UNAVAILABLE"
    write_config(
        repository / "scaled",
        "sequence_batching { direct { minimum_slot_utilization: 2 } }\nmax_batch_sise: 4\nresponse_cache { enable: true }",
    )
    assert [problem.split(": ")[0] for problem in cause("scaled").split("; ") if "scaled/config.pbtxt" in problem] == [
        "scaled/config.pbtxt:1:30",
        "scaled/config.pbtxt:2:1",
        "scaled/config.pbtxt:3:18",
    ]
    write_config(repository / "scaled", 'output [ { name: "OUT" label_filename: "nope.txt" } ]')
    assert "a label file cannot be read: " in cause("scaled")
    assert "scaled/nope.txt" in cause("scaled")


def test_the_index_names_the_version_that_failed(stage: Stage) -> None:
    for version in (1, 2, 3):
        add_scaled(stage.repository, "third_fails", version, version=version)
    (stage.repository / "third_fails" / "3" / "model.onnx").write_bytes(b"broken")
    assert load(stage.server, "third_fails")[0] == 400
    assert list(stage.index()) == [("third_fails", "3")]
    write_config(stage.repository / "third_fails", "version_policy { specific { versions: [ 2, 3 ] } }")
    assert load(stage.server, "third_fails")[0] == 400
    states = stage.index()
    assert list(states) == [("third_fails", "2"), ("third_fails", "3")]
    assert "because version 3 failed" in states[("third_fails", "2")][1]


def test_a_model_in_two_repositories_is_not_served(start: Start, tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    add_scaled(first, "twice", 1)
    add_scaled(second, "twice", 2)
    add_scaled(second, "once", 3)
    server = start(
        "--model-repository", first, "--model-repository", second, "--exit-on-error=0", "--strict-readiness=0"
    )
    assert scaled(server, "once") == 3
    text = "model appears in two or more repositories"
    assert index(server)["twice", ""] == ("UNAVAILABLE", text)
    wait_until(lambda: f"'twice': {text}: {first}/twice, {second}/twice" in server.log, "both paths in the log", server)


def test_serving_one_file_without_repository_or_configuration(start: Start, tmp_path: Path) -> None:
    add_scaled(tmp_path, "x", 4)
    file = (tmp_path / "x" / "1" / "model.onnx").rename(tmp_path / "quad.onnx")
    server = start(file)
    assert scaled(server, "quad") == 4
    config = server.get("/v2/models/quad/config").json
    assert (config["name"], config["max_batch_size"], config["backend"]) == ("quad", 4, "onnxruntime")


def test_labels_and_metric_tags(stage: Stage) -> None:
    server, repository = stage.server, stage.repository
    add_scaled(repository, "scaled", 2)
    (repository / "scaled" / "names.txt").write_text("zero\none\ntwo\nthree\n")
    write_config(
        repository / "scaled",
        'max_batch_size: 4 input { name: "IN" data_type: TYPE_FP32 dims: 4 }'
        'output { name: "OUT" data_type: TYPE_FP32 dims: 4 label_filename: "names.txt" }'
        'metric_tags { key: "team" value: "vision" }',
    )
    assert load(server, "scaled") == (200, "")
    request = {
        "inputs": [{"name": "IN", "shape": [1, 4], "datatype": "FP32", "data": [1, 4, 2, 3]}],
        "outputs": [{"name": "OUT", "parameters": {"classification": 2}}],
    }
    assert server.post("/v2/models/scaled/infer", request).json["outputs"] == [
        {"name": "OUT", "datatype": "BYTES", "shape": [1, 2], "data": ["8.000000:1:one", "6.000000:3:three"]}
    ]
    assert 'nv_inference_request_success{_team="vision",model="scaled",version="1"} 1\n' in server.metrics()


def test_reshape(stage: Stage) -> None:
    server, repository = stage.server, stage.repository
    add_scaled(repository, "scaled", 2)
    write_config(
        repository / "scaled",
        'max_batch_size: 4 input { name: "IN" data_type: TYPE_FP32 dims: [ 2, 2 ] reshape { shape: [ 4 ] } }'
        'output { name: "OUT" data_type: TYPE_FP32 dims: [ 4, 1 ] reshape { shape: [ 4 ] } }',
    )
    assert load(server, "scaled") == (200, "")
    request = {"inputs": [{"name": "IN", "shape": [2, 2, 2], "datatype": "FP32", "data": np.arange(8).tolist()}]}
    output = server.post("/v2/models/scaled/infer", request).json["outputs"][0]
    assert (output["shape"], output["data"]) == ([2, 4, 1], [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0])


def test_each_common_mistake_of_a_beginner_has_one_warning(start: Start, tmp_path: Path, repository: Path) -> None:
    model = tmp_path / "resnet"
    add_scaled(tmp_path, "resnet", 2)
    write_model(repository, "mute", "class TritonPythonModel:\n    def execute(self, requests): return []\n")
    add_scaled(repository, "scaled", 2)
    (repository / "scaled" / "1" / "model.onnx").rename(repository / "scaled" / "1" / "net.onnx")
    add_scaled(repository, "named", 2)
    (repository / "named" / "1" / "model.onnx").rename(repository / "named" / "1" / "net.onnx")
    write_config(repository / "named", 'backend: "onnxruntime"')
    empty = tmp_path / "empty"
    empty.mkdir()
    roots = (f"--model-repository={root}" for root in (model, empty, repository))
    server = start(*roots, "--exit-on-error=false", "--strict-readiness=false")
    wait_until(lambda: "Started HTTPService" in server.log, "the end of the start", server)
    warned = "\n".join(line for line in server.log.splitlines() if line.startswith("W"))
    assert f"there is no model in repository '{empty}': a model is a folder" in warned
    assert f"there is no model in repository '{model}': it contains '1' and looks like a model itself" in warned
    assert "model 'mute': it has no inputs and no outputs: " in warned
    assert warned.count("no model in repository") == 2
    assert "ignoring '1'" not in warned
    reasons = {name: reason for (name, _), (_, reason) in index(server).items()}
    assert "has 'net.onnx' instead of 'model.onnx': rename it" in reasons["scaled"]
    assert f"{repository}/named/1/model.onnx' for model 'named': there is 'net.onnx'; rename it" in reasons["named"]
