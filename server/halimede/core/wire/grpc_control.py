"""gRPC control messages: metadata of the server and its models, configuration, statistics, load and unload."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum

from halimede.core.config.model_config import ModelConfig
from halimede.core.config.model_view import ModelView
from halimede.core.types import DataType, ModelIndexEntry, ServerMetadata
from halimede.core.types.error import clip, invalid, unsupported
from halimede.core.types.statistics import ModelStatistics
from halimede.core.wire.protocol import ProtoMessage, message_class

_ServerMetadataResponse = message_class("inference.ServerMetadataResponse")
_ModelMetadataResponse = message_class("inference.ModelMetadataResponse")
_ModelConfigResponse = message_class("inference.ModelConfigResponse")
_ModelStatisticsResponse = message_class("inference.ModelStatisticsResponse")
_RepositoryIndexResponse = message_class("inference.RepositoryIndexResponse")


def encode_server_metadata(metadata: ServerMetadata) -> ProtoMessage:
    """A ServerMetadataResponse."""
    return _ServerMetadataResponse(name=metadata.name, version=metadata.version, extensions=metadata.extensions)


def encode_model_metadata(view: ModelView) -> ProtoMessage:
    """A ModelMetadataResponse; if the model batches, shapes begin with the batch dimension, as -1."""
    config = view.config
    message = _ModelMetadataResponse(name=view.name, versions=view.versions, platform=config.platform or config.backend)
    batch = (-1,) if config.max_batch_size > 0 else ()
    for tensors, described in ((config.input, message.inputs), (config.output, message.outputs)):
        for tensor in tensors:
            described.add(name=tensor.name, datatype=tensor.data_type.name, shape=(*batch, *tensor.dims))
    return message


def encode_model_config(config: ModelConfig) -> ProtoMessage:
    """A ModelConfigResponse: fields that the configuration does not set are absent from the message."""
    message = _ModelConfigResponse()
    _copy_fields(config, message.config)
    return message


def encode_statistics(statistics: Sequence[ModelStatistics]) -> ProtoMessage:
    """A ModelStatisticsResponse."""
    message = _ModelStatisticsResponse()
    for model in statistics:
        entry = message.model_stats.add(
            name=model.name,
            version=model.version,
            last_inference=model.last_inference_ms,
            inference_count=model.inference_count,
            execution_count=model.execution_count,
        )
        _copy_fields(model.inference, entry.inference_stats)
        for batch in model.batches:
            _copy_fields(batch, entry.batch_stats.add())
        for index, response in enumerate(model.responses):
            _copy_fields(response, entry.response_stats[str(index)])
    return message


def encode_index(entries: Sequence[ModelIndexEntry]) -> ProtoMessage:
    """A RepositoryIndexResponse."""
    message = _RepositoryIndexResponse()
    for entry in entries:
        state = entry.state.value if entry.state else ""
        message.models.add(name=entry.name, version=entry.version, state=state, reason=entry.reason)
    return message


def check_repository_name(message: ProtoMessage) -> None:
    """UNSUPPORTED if a repository request names a repository: models are identified by name alone."""
    if message.repository_name:
        raise unsupported("'repository_name' specification is not supported")


def decode_load_parameters(message: ProtoMessage) -> dict[str, str | bytes]:
    """The parameters of a RepositoryModelLoadRequest: `config` and `file:<version>/<path>`."""
    parameters: dict[str, str | bytes] = {}
    for key, parameter in message.parameters.items():
        if key == "config":
            expected = "string_param"
        elif key.startswith("file:"):
            expected = "bytes_param"
        else:
            raise invalid(f"unrecognized load parameter '{clip(key)}'.")
        if parameter.WhichOneof("parameter_choice") != expected:
            raise invalid(f"invalid value type for load parameter '{clip(key)}', expected {expected}.")
        parameters[key] = getattr(parameter, expected)
    return parameters


def decode_unload_dependents(message: ProtoMessage) -> bool:
    """Whether a RepositoryModelUnloadRequest asks to unload the models that its model depends on as well."""
    if "unload_dependents" not in message.parameters:
        return False
    parameter = message.parameters["unload_dependents"]
    if parameter.WhichOneof("parameter_choice") != "bool_param":
        raise invalid("invalid value type for 'unload_dependents' parameter, expected bool_param.")
    return bool(parameter.bool_param)


def _copy_fields(data: object, message: ProtoMessage) -> None:
    """Copy a dataclass into the message, whose fields have the same names (`global_` is the protocol's `global`)."""
    for field in fields(data):  # type: ignore[arg-type]  # every caller passes a dataclass
        value = getattr(data, field.name)
        name = field.name.removesuffix("_")
        if value is None:
            continue
        if isinstance(value, Mapping):
            _copy_map(value, getattr(message, name))
        elif isinstance(value, tuple):
            _copy_repeated(value, getattr(message, name))
        elif is_dataclass(value):
            inner = getattr(message, name)
            inner.SetInParent()
            _copy_fields(value, inner)
        else:
            setattr(message, name, _scalar(value))


def _copy_map(entries: Mapping[object, object], target: ProtoMessage) -> None:
    for key, value in entries.items():
        if is_dataclass(value):
            # Reading the key creates the entry, also for a message without fields.
            _copy_fields(value, target[key])
        else:
            target[key] = value


def _copy_repeated(values: tuple[object, ...], target: ProtoMessage) -> None:
    for value in values:
        if is_dataclass(value):
            _copy_fields(value, target.add())
        else:
            target.append(_scalar(value))


def _scalar(value: object) -> object:
    if isinstance(value, DataType):
        return value.number
    return value.value if isinstance(value, Enum) else value
