"""NVIDIA's tritonclient against the running server: the documented API, both protocols, sync, async and streaming."""

import queue
from functools import partial

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from support.server import RunningServer

A = np.arange(16, dtype=np.int32).reshape(1, 16)
B = np.ones((1, 16), dtype=np.int32)


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: RunningServer):
    module = httpclient if request.param == "http" else grpcclient
    options = {"concurrency": 4} if request.param == "http" else {}
    with module.InferenceServerClient(
        server.http_url if request.param == "http" else server.grpc_url, **options
    ) as made:
        made.module = module
        yield made


def tensors(module, a: np.ndarray = A, b: np.ndarray = B, datatype: str = "INT32", **options: object) -> list:
    inputs = [module.InferInput("INPUT0", a.shape, datatype), module.InferInput("INPUT1", b.shape, datatype)]
    inputs[0].set_data_from_numpy(a, **options)
    inputs[1].set_data_from_numpy(b, **options)
    return inputs


def test_health_and_metadata(client) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("simple")
    assert client.is_model_ready("simple", "1")
    if client.module is httpclient:
        server, model, config = (
            client.get_server_metadata(),
            client.get_model_metadata("simple"),
            client.get_model_config("simple"),
        )
    else:
        server = client.get_server_metadata(as_json=True)
        model = client.get_model_metadata("simple", as_json=True)
        config = client.get_model_config("simple", as_json=True)["config"]
    assert server["name"] == "triton"
    # Triton's names in Triton's order, without shared memory, trace and logging, which this server does not have.
    assert server["extensions"] == [
        "classification",
        "sequence",
        "model_repository",
        "model_repository(unload_dependents)",
        "schedule_policy",
        "model_configuration",
        "binary_tensor_data",
        "parameters",
        "statistics",
    ]
    assert (model["name"], model["versions"], model["platform"]) == ("simple", ["1"], "onnxruntime_onnx")
    assert [tensor["name"] for tensor in model["inputs"]] == ["INPUT0", "INPUT1"]
    assert [str(dim) for dim in model["outputs"][0]["shape"]] == ["-1", "16"]
    assert config["max_batch_size"] == 8


def test_infer(client) -> None:
    outputs = [client.module.InferRequestedOutput("OUTPUT0"), client.module.InferRequestedOutput("OUTPUT1")]
    result = client.infer("simple", tensors(client.module), outputs=outputs, request_id="7")
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), A + B)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), A - B)
    response = result.get_response()
    assert (response["id"] if isinstance(response, dict) else response.id) == "7"


def test_infer_strings(client) -> None:
    a, b = (np.array([[str(v).encode() for v in row] for row in x], dtype=object) for x in (A, B))
    result = client.infer("simple_string", tensors(client.module, a, b, "BYTES"))
    assert [int(v) for v in result.as_numpy("OUTPUT0")[0]] == (A + B)[0].tolist()
    assert [int(v) for v in result.as_numpy("OUTPUT1")[0]] == (A - B)[0].tolist()


def test_async_infer(client) -> None:
    if client.module is httpclient:
        pending = [client.async_infer("simple", tensors(httpclient, A + n)) for n in range(32)]
        results = [request.get_result() for request in pending]
    else:
        done: queue.Queue = queue.Queue()
        for n in range(32):
            client.async_infer(
                "simple", tensors(grpcclient, A + n), partial(lambda n, result, error: done.put((n, result, error)), n)
            )
        collected = sorted((done.get(timeout=20) for _ in range(32)), key=lambda entry: entry[0])
        assert [error for _, _, error in collected] == [None] * 32
        results = [result for _, result, _ in collected]
    for n, result in enumerate(results):
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), A + n + B)


def test_one_output_and_a_chosen_version(client) -> None:
    x = np.array([[1, 2, 3, 4]], dtype=np.float32)
    inputs = [client.module.InferInput("IN", x.shape, "FP32")]
    inputs[0].set_data_from_numpy(x)
    np.testing.assert_array_equal(client.infer("scaled", inputs).as_numpy("OUT"), 3 * x)
    np.testing.assert_array_equal(client.infer("scaled", inputs, model_version="1").as_numpy("OUT"), 2 * x)


def test_errors_carry_the_servers_text(client) -> None:
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'nope' is not found"):
        client.infer("nope", tensors(client.module))
    with pytest.raises(InferenceServerException, match="unexpected shape for input 'INPUT0'"):
        client.infer("simple", tensors(client.module, A[:, :15], B[:, :15]))


def test_classification(client) -> None:
    outputs = [client.module.InferRequestedOutput("OUTPUT0", class_count=2)]
    classes = client.infer("simple", tensors(client.module), outputs=outputs).as_numpy("OUTPUT0")
    assert [value.decode() for value in classes[0]] == ["16:15", "15:14"]


def test_statistics_and_index(client) -> None:
    client.infer("simple", tensors(client.module))
    if client.module is httpclient:
        stats = client.get_inference_statistics("simple")["model_stats"][0]
        index = client.get_model_repository_index()
    else:
        stats = client.get_inference_statistics("simple", as_json=True)["model_stats"][0]
        index = client.get_model_repository_index(as_json=True)["models"]
    assert int(stats["inference_stats"]["success"]["count"]) >= 1
    assert {"name": "simple", "version": "1", "state": "READY"}.items() <= next(
        m for m in index if m["name"] == "simple"
    ).items()


def test_control_is_refused_without_explicit_mode(client) -> None:
    with pytest.raises(
        InferenceServerException,
        match="explicit model load / unload is not allowed if polling is enabled or --model-control-mode is none; start",
    ):
        client.load_model("simple")


def test_grpc_streaming_keeps_the_order_of_the_requests(server: RunningServer) -> None:
    answers: queue.Queue = queue.Queue()
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for n in range(50):
            client.async_stream_infer("simple", tensors(grpcclient, A + n), request_id=str(n))
        client.async_stream_infer("nope", tensors(grpcclient), request_id="bad")
        client.async_stream_infer("simple", tensors(grpcclient), request_id="after")
        collected = [answers.get(timeout=20) for _ in range(52)]
        client.stop_stream()
    for n, (result, error) in enumerate(collected[:50]):
        assert error is None
        assert result.get_response().id == str(n)
        assert result.get_response().parameters["triton_final_response"].bool_param
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), A + n + B)
    assert "Request for unknown model: 'nope' is not found" in str(collected[50][1])
    assert collected[51][0].get_response().id == "after"


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("BOOL", np.array([[True, False]])),
        ("UINT8", np.array([[0, 255]], np.uint8)),
        ("INT8", np.array([[-128, 127]], np.int8)),
        ("UINT16", np.array([[0, 65535]], np.uint16)),
        ("INT16", np.array([[-32768, 32767]], np.int16)),
        ("UINT32", np.array([[0, 2**32 - 1]], np.uint32)),
        ("INT32", np.array([[-(2**31), 2**31 - 1]], np.int32)),
        ("UINT64", np.array([[0, 2**64 - 1]], np.uint64)),
        ("INT64", np.array([[-(2**63), 2**63 - 1]], np.int64)),
        ("FP16", np.array([[0.5, -65504]], np.float16)),
        ("FP32", np.array([[0.1, -3e38]], np.float32)),
        ("FP64", np.array([[0.1, -1e308]], np.float64)),
        ("BYTES", np.array([[b"", b"\xff\x00a"]], object)),
    ],
)
def test_every_datatype_round_trips(client, datatype: str, values: np.ndarray) -> None:
    inputs = [client.module.InferInput("IN", values.shape, datatype)]
    inputs[0].set_data_from_numpy(values)
    result = client.infer(f"ident_{datatype.lower()}", inputs).as_numpy("OUT")
    assert result.tolist() == values.tolist()
