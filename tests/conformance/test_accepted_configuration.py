"""Configurations with unsupported features: accepted with one warning if no answer depends on the feature."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from support.calls import ONES, index
from support.models import add_identity, add_onnx_identity, write_config
from support.served import add_python
from support.server import RunningServer, serving, wait_until

WARMUP = """
model_warmup { name: "w" batch_size: 1 inputs { key: "IN" value { data_type: TYPE_FP32 dims: 16 zero_data: true } } }
"""
CACHE = "response_cache { enable: true }"
OPERATIONS = 'model_operations { op_library_filename: "operations.so" }'
PRIORITIES = """
dynamic_batching {
  priority_levels: 3 default_priority_level: 2
  priority_queue_policy { key: 1 value { max_queue_size: 4 } }
}
"""
GPU = """
optimization {
  priority: PRIORITY_MAX cuda { graphs: true } input_pinned_memory { enable: false }
  execution_accelerators {
    gpu_execution_accelerator { name: "tensorrt" parameters { key: "precision_mode" value: "FP8" } }
  }
}
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    add_identity(repository, "warm", extra=WARMUP + CACHE)
    add_identity(repository, "urgent", extra=PRIORITIES)
    add_python(repository, "stream", dims="16", decoupled=True, extra=WARMUP)
    add_onnx_identity(repository, "fast", "FP32", ["N", 16])
    write_config(repository / "fast", GPU)
    for name, refused in {"both": CACHE + "model_transaction_policy { decoupled: true }", "dirty": WARMUP}.items():
        add_identity(repository, name, extra=refused + OPERATIONS * (name == "dirty"))
    with serving(
        tmp_path_factory.mktemp("log"), ["--model-repository", repository, "--exit-on-error=false"], ready=False
    ) as server:
        wait_until(lambda: "Started HTTPService" in server.log, "the end of all loads", server)
        yield server


def warnings(server: RunningServer, model: str) -> list[str]:
    head = f"model '{model}': "
    lines = [json.loads(line.partition("] ")[2]) for line in server.log.splitlines() if line.startswith("W")]
    return [line.removeprefix(head) for line in lines if line.startswith(head)]


def test_unsupported_features_get_one_warning_per_model(running: RunningServer) -> None:
    states = {name: state for (name, _), (state, _) in index(running).items()}
    assert states == {
        **dict.fromkeys(("warm", "urgent", "stream", "fast"), "READY"),
        **dict.fromkeys(("both", "dirty"), "UNAVAILABLE"),
    }
    assert warnings(running, "warm") == [
        "'model_warmup' has no effect: warm-up is not supported yet: the first requests may take longer; "
        "'response_cache.enable' has no effect: the response cache is not supported yet: the model runs for every request"
    ]
    assert warnings(running, "urgent") == [], "priorities are honoured"
    for model, fields in {
        "stream": ["model_warmup"],
        "fast": ["priority", "cuda", "input_pinned_memory", "gpu_execution_accelerator"],
    }.items():
        (warning,) = warnings(running, model)
        assert [each.split("'")[1].split(".")[-1] for each in warning.split("; ")] == fields


def test_fields_that_change_answers_or_that_triton_refuses_are_refused(running: RunningServer) -> None:
    reasons = {name: reason for (name, _), (_, reason) in index(running).items()}
    assert reasons["both"].endswith(
        "Response Cache does not currently support model both with 'decoupled' transaction policy. Please disable the "
        "response cache."
    )
    assert (
        "'model_operations.op_library_filename' is not supported yet for backends other than tensorflow"
        in reasons["dirty"]
    )


@pytest.mark.parametrize("model", ["urgent", "warm"])
def test_a_request_may_have_any_priority(running: RunningServer, model: str) -> None:
    body = {**ONES, "parameters": {"priority": 99}}
    assert running.post(f"/v2/models/{model}/infer", body).status == 200
    for client in (httpclient, grpcclient):
        url = running.http_url if client is httpclient else running.grpc_url
        with client.InferenceServerClient(url) as caller:
            tensor = client.InferInput("IN", [1, 16], "FP32")
            tensor.set_data_from_numpy(np.ones((1, 16), np.float32))
            assert caller.infer(model, [tensor], priority=1).as_numpy("OUT").tolist() == [[1.0] * 16]
