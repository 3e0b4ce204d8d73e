"""Control calls as HTTP bodies: metadata, statistics, the repository index, load and unload.

These routes keep Triton's numbers as well as its texts, because scripts depend on them: a body that is not the JSON
that was expected is INTERNAL here, not INVALID_ARG as for inference.
"""

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import orjson

from halimede.core.config.model_config import ModelInput, ModelOutput
from halimede.core.config.model_view import ModelView
from halimede.core.types import Buffer, DeviceReport, DeviceState, InferenceError, ModelIndexEntry, ServerMetadata
from halimede.core.types.error import clip, internal, invalid
from halimede.core.types.statistics import ModelStatistics
from halimede.core.wire.json_access import without_mark


def metadata_json(metadata: ServerMetadata) -> bytes:
    """The body of `GET /v2`."""
    return orjson.dumps({"name": metadata.name, "version": metadata.version, "extensions": metadata.extensions})


def model_metadata_json(view: ModelView) -> bytes:
    """The body of `GET /v2/models/<m>`; shapes have the batch dimension in front, as -1, if the model batches."""
    config = view.config
    batch = (-1,) if config.max_batch_size > 0 else ()
    return orjson.dumps(
        {
            "name": view.name,
            "versions": view.versions,
            "platform": config.platform or config.backend,
            "inputs": [_tensor_metadata(tensor, batch) for tensor in config.input],
            "outputs": [_tensor_metadata(tensor, batch) for tensor in config.output],
        }
    )


def _tensor_metadata(tensor: ModelInput | ModelOutput, batch: tuple[int, ...]) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.data_type.name, "shape": (*batch, *tensor.dims)}


def statistics_json(statistics: Sequence[ModelStatistics]) -> bytes:
    """The body of `GET /v2/models/stats`. `response_stats` is empty but for decoupled models, `memory_usage` always."""
    return orjson.dumps({"model_stats": [_model_statistics(model) for model in statistics]})


def _model_statistics(model: ModelStatistics) -> dict[str, Any]:
    return {
        "name": model.name,
        "version": model.version,
        "last_inference": model.last_inference_ms,
        "inference_count": model.inference_count,
        "execution_count": model.execution_count,
        # The names of their fields, in this order, are the protocol's.
        "inference_stats": model.inference,
        "response_stats": {str(index): response for index, response in enumerate(model.responses)},
        "batch_stats": model.batches,
        "memory_usage": [],
    }


def index_json(entries: Sequence[ModelIndexEntry]) -> bytes:
    """The body of `POST /v2/repository/index`; empty members are left out.

    `workers` is an extension for versions with worker processes: `{}` while they are healthy.
    """
    return orjson.dumps([_index_entry(entry) for entry in entries])


def _index_entry(entry: ModelIndexEntry) -> dict[str, object]:
    members: dict[str, object] = {"name": entry.name}
    if entry.version:
        members["version"] = entry.version
    if entry.state is not None:
        members["state"] = entry.state.value
    if entry.reason:
        members["reason"] = entry.reason
    if entry.workers is not None:
        failure, out_of_memory = entry.workers.failure, entry.workers.out_of_memory
        members["workers"] = {"failure": failure, "out_of_memory": out_of_memory} if failure else {}
    return members


def devices_json(report: DeviceReport) -> bytes:
    """The body of `GET /v2/halimede/devices`; figures that are not known are left out."""
    body: dict[str, object] = {"devices": [_device(state) for state in report.devices]}
    body["host"] = {} if report.host_peak_bytes is None else {"memory_peak_bytes": report.host_peak_bytes}
    return orjson.dumps(body)


def _device(state: DeviceState) -> dict[str, object]:
    device, memory = state.device, state.memory
    members: dict[str, object] = {"index": device.index, "uuid": device.uuid, "kind": device.kind.value}
    if device.name:
        members["name"] = device.name
    if device.profile:
        members["profile"] = device.profile
    if device.compute_capability != (0, 0):
        members["compute_capability"] = "{}.{}".format(*device.compute_capability)
    if device.memory_bytes:
        members["memory_total_bytes"] = device.memory_bytes
    if memory is not None:
        members["memory_used_bytes"] = memory.used_bytes
        members["memory_before_bytes"] = memory.before_bytes
        members["memory_peak_bytes"] = memory.peak_bytes
    members["instances"] = [
        {"model": each.model, "version": each.version, "count": each.count} for each in state.instances
    ]
    return members


def error_json(message: str) -> bytes:
    """The body of an error response. It never fails: text that is not Unicode is replaced."""
    return orjson.dumps({"error": message.encode("utf-8", "replace").decode()})


def decode_index_request(body: Buffer) -> bool:
    """Whether only ready models are requested."""
    ready = _document(body).get("ready", False)
    if not isinstance(ready, bool):
        raise invalid("Invalid value for 'ready': expected a boolean")
    return ready


def decode_load_request(body: Buffer) -> dict[str, str | bytes]:
    """The load parameters: `config` is JSON text, `file:<version>/<path>` are the bytes that came in base64."""
    parameters: dict[str, str | bytes] = {}
    for key, value in _parameters(body).items():
        if key != "config" and not key.startswith("file:"):
            raise internal(
                f"unexpected error on creating Triton parameter: '{clip(key)}' is neither 'config' nor"
                " 'file:<version>/<path>'"
            )
        if not isinstance(value, str):
            raise _wrong_type(key, "string")
        parameters[key] = value if key == "config" else _from_base64(key, value)
    return parameters


def decode_unload_request(body: Buffer) -> bool:
    """Whether the models that this one depends on are unloaded, too."""
    unload_dependents = _parameters(body).get("unload_dependents", False)
    if not isinstance(unload_dependents, bool):
        raise _wrong_type("unload_dependents", "boolean")
    return unload_dependents


def _from_base64(key: str, value: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid(f"load parameter '{clip(key)}' must be the file's content in base64: {error}") from None


def _parameters(body: Buffer) -> dict[str, Any]:
    parameters = _document(body).get("parameters", {})
    if not isinstance(parameters, dict):
        raise _wrong_type("parameters", "object")
    return parameters


def _document(body: Buffer) -> dict[str, Any]:
    """The members of a body; an empty body has none."""
    body = without_mark(body)
    if not len(body):
        return {}
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise internal(f"failed to parse the request JSON buffer: {error.msg}. at {error.pos}") from None
    if not isinstance(document, dict):
        raise internal("failed to parse the request JSON buffer: it is not an object. at 0")
    return document


def _wrong_type(key: str, kind: str) -> InferenceError:
    return internal(f"Unable to parse '{clip(key)}': attempt to access JSON non-{kind} as {kind}")
