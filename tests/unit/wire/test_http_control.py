"""Control bodies: exact JSON for responses, Triton's texts for invalid requests."""

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings

from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput
from halimede.core.config.model_view import ModelView
from halimede.core.types import (
    DataType,
    Device,
    DeviceKind,
    DeviceMemory,
    DeviceReport,
    DeviceState,
    ErrorCode,
    InferenceError,
    ModelIndexEntry,
    ModelReadyState,
    PlacedInstances,
    ServerMetadata,
)
from halimede.core.types.server import WorkerHealth
from halimede.core.types.statistics import (
    BatchStatistics,
    Duration,
    InferStatistics,
    ModelStatistics,
    ResponseStatistics,
)
from halimede.core.wire.http_control import (
    decode_index_request,
    decode_load_request,
    decode_unload_request,
    devices_json,
    error_json,
    index_json,
    metadata_json,
    model_metadata_json,
    statistics_json,
)
from support.examples import Draws, drawn, json_of
from support.refusals import error_of


def internal(text: str) -> InferenceError:
    return InferenceError(ErrorCode.INTERNAL, text)


def test_server_metadata() -> None:
    assert (
        metadata_json(ServerMetadata("triton", "2.0", ("classification", "sequence")))
        == b'{"name":"triton","version":"2.0","extensions":["classification","sequence"]}'
    )


def test_model_metadata_has_the_batch_dimension_first() -> None:
    config = ModelConfig(
        name="m",
        backend="python",
        max_batch_size=8,
        input=(ModelInput("a", DataType.BYTES, dims=(-1,)),),
        output=(ModelOutput("b", DataType.FP32, dims=(2, 3)),),
    )
    assert model_metadata_json(ModelView("m", "2", ("1", "2"), config, {})) == (
        b'{"name":"m","versions":["1","2"],"platform":"python",'
        b'"inputs":[{"name":"a","datatype":"BYTES","shape":[-1,-1]}],'
        b'"outputs":[{"name":"b","datatype":"FP32","shape":[-1,2,3]}]}'
    )


def test_a_model_without_batching_has_the_shapes_of_its_configuration() -> None:
    config = ModelConfig(name="m", platform="ensemble", output=(ModelOutput("b", DataType.BOOL, dims=(4,)),))
    assert model_metadata_json(ModelView("m", "1", ("1",), config, {})) == (
        b'{"name":"m","versions":["1"],"platform":"ensemble","inputs":[],'
        b'"outputs":[{"name":"b","datatype":"BOOL","shape":[4]}]}'
    )


def test_statistics_have_every_member_that_tools_subtract() -> None:
    inference = InferStatistics(success=Duration(3, 30), cache_hit=Duration(1, 2))
    batches = [BatchStatistics(4, compute_infer=Duration(1, 9))]
    model = ModelStatistics("m", "1", 1700000000000, 8, 2, inference, batches)
    zero = b'{"count":0,"ns":0}'
    assert statistics_json([model]) == (
        b'{"model_stats":[{"name":"m","version":"1","last_inference":1700000000000,"inference_count":8,'
        b'"execution_count":2,"inference_stats":{"success":{"count":3,"ns":30},"fail":%b,"queue":%b,'
        b'"compute_input":%b,"compute_infer":%b,"compute_output":%b,"cache_hit":{"count":1,"ns":2},"cache_miss":%b},'
        b'"response_stats":{},"batch_stats":[{"batch_size":4,"compute_input":%b,"compute_infer":{"count":1,"ns":9},'
        b'"compute_output":%b}],"memory_usage":[]}]}' % ((zero,) * 8)
    )
    assert statistics_json([]) == b'{"model_stats":[]}'


def test_answers_of_a_decoupled_model_are_listed_by_their_index() -> None:
    responses = [ResponseStatistics(compute_infer=Duration(2, 7), fail=Duration(1, 3)), ResponseStatistics()]
    (model,) = json.loads(statistics_json([ModelStatistics("m", "1", responses=responses)]))["model_stats"]
    zero = {"count": 0, "ns": 0}
    nothing = dict.fromkeys(("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel"), zero)
    assert model["response_stats"] == {
        "0": {**nothing, "compute_infer": {"count": 2, "ns": 7}, "fail": {"count": 1, "ns": 3}},
        "1": nothing,
    }


def test_index_omits_unknown_members() -> None:
    entries = [
        ModelIndexEntry("never"),
        ModelIndexEntry("good", "1", ModelReadyState.READY),
        ModelIndexEntry("gone", "2", ModelReadyState.UNAVAILABLE, "unloaded"),
    ]
    assert index_json(entries) == (
        b'[{"name":"never"},{"name":"good","version":"1","state":"READY"},'
        b'{"name":"gone","version":"2","state":"UNAVAILABLE","reason":"unloaded"}]'
    )


def test_index_has_the_health_of_worker_processes() -> None:
    entries = [
        ModelIndexEntry("well", "1", ModelReadyState.READY, workers=WorkerHealth()),
        ModelIndexEntry("ill", "1", ModelReadyState.READY, workers=WorkerHealth("worker exited: signal 9", True)),
    ]
    assert index_json(entries) == (
        b'[{"name":"well","version":"1","state":"READY","workers":{}},'
        b'{"name":"ill","version":"1","state":"READY",'
        b'"workers":{"failure":"worker exited: signal 9","out_of_memory":true}}]'
    )


def test_devices_omit_figures_that_are_not_known() -> None:
    whole = Device(DeviceKind.GPU, 0, "GPU-1", "NVIDIA H200", 150_000_000_000, (9, 0))
    part = Device(DeviceKind.MIG, 3, "MIG-2", profile="1g.10gb")
    memory = DeviceMemory(used_bytes=7, before_bytes=5, peak_bytes=9)
    report = DeviceReport((DeviceState(whole, memory, (PlacedInstances("bert", "2", 4),)), DeviceState(part)), 1 << 30)
    assert json.loads(devices_json(report)) == {
        "devices": [
            {
                "index": 0,
                "uuid": "GPU-1",
                "kind": "GPU",
                "name": "NVIDIA H200",
                "compute_capability": "9.0",
                "memory_total_bytes": 150_000_000_000,
                "memory_used_bytes": 7,
                "memory_before_bytes": 5,
                "memory_peak_bytes": 9,
                "instances": [{"model": "bert", "version": "2", "count": 4}],
            },
            {"index": 3, "uuid": "MIG-2", "kind": "MIG", "profile": "1g.10gb", "instances": []},
        ],
        "host": {"memory_peak_bytes": 1 << 30},
    }
    assert devices_json(DeviceReport(())) == b'{"devices":[],"host":{}}'


def test_errors_with_any_text_are_json() -> None:
    assert error_json('no "x"\n') == b'{"error":"no \\"x\\"\\n"}'
    assert error_json("\udcff") == b'{"error":"?"}'


@pytest.mark.parametrize(
    ("body", "ready"), [(b"", False), (b"{}", False), (b'{"ready":true}', True), (b'{"ready":false,"x":1}', False)]
)
def test_index_lists_ready_models_or_all(body: bytes, ready: bool) -> None:
    assert decode_index_request(body) is ready


def test_invalid_bodies_of_index_requests() -> None:
    assert error_of(decode_index_request, b'{"ready":"x"}') == InferenceError(
        ErrorCode.INVALID_ARG, "Invalid value for 'ready': expected a boolean"
    )
    assert error_of(decode_index_request, b"{nope").code is ErrorCode.INTERNAL
    assert error_of(decode_index_request, b"[]") == internal(
        "failed to parse the request JSON buffer: it is not an object. at 0"
    )


def test_load_parameters() -> None:
    content = bytes(range(256))
    body = b'{"parameters":{"config":"{}","file:1/model.onnx":"%b"}}' % base64.b64encode(content)
    assert decode_load_request(body) == {"config": "{}", "file:1/model.onnx": content}
    assert decode_load_request(b"") == {}
    assert decode_load_request(b'{"x":1}') == {}


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (
            b'{"parameters":{"nope":"x"}}',
            internal(
                "unexpected error on creating Triton parameter: 'nope' is neither 'config' nor 'file:<version>/<path>'"
            ),
        ),
        (
            b'{"parameters":{"config":{}}}',
            internal("Unable to parse 'config': attempt to access JSON non-string as string"),
        ),
        (
            b'{"parameters":[]}',
            internal("Unable to parse 'parameters': attempt to access JSON non-object as object"),
        ),
        (
            b'{"parameters":{"file:1/m":"abc"}}',
            InferenceError(
                ErrorCode.INVALID_ARG,
                "load parameter 'file:1/m' must be the file's content in base64: Incorrect padding",
            ),
        ),
    ],
)
def test_wrong_load_parameters(body: bytes, error: InferenceError) -> None:
    assert error_of(decode_load_request, body) == error


def test_unload_includes_dependents_on_request() -> None:
    assert decode_unload_request(b"") is False
    assert decode_unload_request(b'{"parameters":{"unload_dependents":true}}') is True
    assert error_of(decode_unload_request, b'{"parameters":{"unload_dependents":1}}') == internal(
        "Unable to parse 'unload_dependents': attempt to access JSON non-boolean as boolean"
    )


NAMES = ("parameters", "ready", "unload_dependents", "config", "file:1/m")


def scalar(draws: Draws) -> Any:
    match draws.below(3):
        case 0:
            return draws.pick((None, True, False))
        case 1:
            return draws.integer(-(2**70), 2**70)
        case _:
            return draws.text(8)


def name(draws: Draws) -> str:
    return draws.pick(NAMES) if draws.below(2) else draws.text(4)


def value(draws: Draws) -> Any:
    return json_of(draws, scalar, name, levels=2)


def body_of(draws: Draws) -> bytes:
    match draws.below(4):
        case 0:
            return draws.raw(draws.below(60))
        case 1:
            return json.dumps(value(draws)).encode()
        case _:
            return json.dumps({name(draws): value(draws) for _ in range(draws.below(4))}).encode()


@pytest.mark.parametrize(
    ("decode", "result_type"),
    [(decode_index_request, bool), (decode_load_request, dict), (decode_unload_request, bool)],
)
@settings(deadline=None)
@given(body=drawn(body_of, 100))
def test_any_bytes_are_decoded_or_refused(decode: Callable[[bytes], Any], result_type: type, body: bytes) -> None:
    try:
        outcome: object = type(decode(body))
    except InferenceError as error:
        outcome = error.code
    assert outcome in (result_type, ErrorCode.INTERNAL, ErrorCode.INVALID_ARG)
