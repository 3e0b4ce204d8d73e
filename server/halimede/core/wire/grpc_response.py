"""Write responses of ModelInfer and ModelStreamInfer. Outputs always leave in `raw_output_contents`."""

from functools import lru_cache

from halimede.core.config.model_view import ModelView
from halimede.core.types import DataType, InferenceError, InferenceResponse, ParameterValue
from halimede.core.types.error import clip, internal
from halimede.core.types.tensor import Buffer
from halimede.core.wire.classification import classify
from halimede.core.wire.destinations import ALL_BINARY, Destinations
from halimede.core.wire.grpc_large import LARGE_BYTES, varint
from halimede.core.wire.protocol import ModelInferResponse, ModelStreamInferResponse, ProtoMessage
from halimede.core.wire.steps import Steps

STATUS_MESSAGE_LIMIT = 4096

# Tags of ModelInferResponse.id and .raw_output_contents, and of ModelStreamInferResponse.infer_response.
_ID_TAG, _RAW_OUTPUT_TAG, _INFER_RESPONSE_TAG = b"\x1a", b"\x32", b"\x12"


def status_message(text: str) -> str:
    """The text, cut so that it takes at most 4 KiB as a gRPC status message.

    The message is sent percent-encoded in the trailers, and a client that gets trailers of too many bytes shows an
    error of its own instead.
    """
    raw = text.encode("utf-8", "replace")
    size = 0
    for at, byte in enumerate(raw):
        size += 1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3
        if size > STATUS_MESSAGE_LIMIT:
            return raw[: at - 4].decode("utf-8", "ignore") + "..."
    return raw.decode()


def encode_infer(response: InferenceResponse, view: ModelView, destinations: Destinations) -> list[Buffer]:
    """Encode a response without error as ModelInferResponse; INVALID_ARG for classes of a datatype without them.

    The message is the parts together. The bytes of large tensors are parts of their own and not copied.
    """
    if len(response.outputs) == 1 and destinations is ALL_BINARY and not response.parameters:
        # The usual answer. Its fields are in the order of their numbers, as protobuf writes them.
        sole = response.outputs[0]
        data = sole.data
        model = _model(response.model_name, response.model_version)
        output = _sole_output(sole.name, sole.datatype, sole.shape, len(data))
        if not response.id:
            return [model, output, data]
        raw_id = response.id.encode()
        return [model, _ID_TAG + varint(len(raw_id)), raw_id, output, data]
    message = ModelInferResponse()
    large = _fill(message, response, view, destinations)
    head = message.SerializeToString()
    return [head, *large] if large else [head]


@lru_cache(maxsize=1024)
def _model(name: str, version: str) -> bytes:
    encoded: bytes = ModelInferResponse(model_name=name, model_version=version).SerializeToString()
    return encoded


@lru_cache(maxsize=1024)
def _sole_output(name: str, datatype: DataType, shape: tuple[int, ...], size: int) -> bytes:
    """All that is between the id and the data of a response of one output. Responses to similar requests share it."""
    message = ModelInferResponse()
    message.outputs.add(name=name, datatype=datatype.name, shape=shape)
    return bytes(message.SerializeToString()) + _RAW_OUTPUT_TAG + varint(size)


def encode_infer_steps(response: InferenceResponse, view: ModelView, destinations: Destinations) -> Steps[list[Buffer]]:
    """As `encode_infer`, in steps. Only classes of large outputs take long: all else takes some microseconds."""
    yield 0
    return encode_infer(response, view, destinations)


def encode_stream_infer(response: InferenceResponse, view: ModelView, destinations: Destinations) -> list[Buffer]:
    """As `encode_infer`, in a ModelStreamInferResponse that states whether it is the last one."""
    inner = ModelInferResponse()
    large = _fill(inner, response, view, destinations)
    inner.parameters["triton_final_response"].bool_param = response.final
    head = inner.SerializeToString()
    return [_INFER_RESPONSE_TAG + varint(len(head) + sum(map(len, large))), head, *large]


def encode_empty_final(response: InferenceResponse) -> list[Buffer]:
    """A ModelStreamInferResponse without content that ends the responses of a decoupled model."""
    message = ModelStreamInferResponse()
    inner = message.infer_response
    inner.model_name = response.model_name
    inner.id = response.id
    inner.parameters["triton_final_response"].bool_param = True
    return [message.SerializeToString()]


def encode_stream_error(
    request_id: str, error: InferenceError, executed_by: str = "", *, final: bool = True
) -> list[Buffer]:
    """A ModelStreamInferResponse with an error; `executed_by` names the model if the request reached it.

    Only decoupled models may continue after an error: then it is not `final`.
    """
    message = ModelStreamInferResponse()
    # With an empty text a client would treat this as a successful response.
    message.error_message = status_message(error.message) or error.code.value
    inner = message.infer_response
    inner.id = request_id
    if executed_by:
        inner.model_name = executed_by
        inner.parameters["triton_final_response"].bool_param = final
    return [message.SerializeToString()]


def _fill(
    message: ProtoMessage, response: InferenceResponse, view: ModelView, destinations: Destinations
) -> list[Buffer]:
    """Fill a ModelInferResponse, and return what follows it: from the first large output on, the encoded entries of
    `raw_output_contents`. No field has a larger number, so that the bytes are those that protobuf would write."""
    large: list[Buffer] = []
    message.model_name = response.model_name
    message.model_version = response.model_version
    message.id = response.id
    for key, value in response.parameters.items():
        _write_parameter(message.parameters[key], key, value, response.model_name)
    for answer in response.outputs:
        output = answer
        if destinations is not ALL_BINARY and (classes := destinations.of(answer.name).classes):
            labels = view.labels.get(answer.name, ())
            output = classify(answer, classes, labels, view.config.max_batch_size > 0)
        tensor = message.outputs.add()
        tensor.name = output.name
        tensor.datatype = output.datatype.name
        tensor.shape.extend(output.shape)
        data = output.data
        if large or len(data) > LARGE_BYTES:
            large += (_RAW_OUTPUT_TAG + varint(len(data)), data)
        else:
            message.raw_output_contents.append(data if type(data) is bytes else bytes(data))
    return large


def _write_parameter(parameter: ProtoMessage, key: str, value: ParameterValue, model: str) -> None:
    match value:
        case bool():
            parameter.bool_param = value
        case str():
            parameter.string_param = value
        case float():
            parameter.double_param = value
        case int() if -(2**63) <= value < 2**63:
            parameter.int64_param = value
        case int() if 0 <= value < 2**64:
            parameter.uint64_param = value
        case _:
            raise internal(
                f"response parameter '{clip(key)}' of model '{model}' is outside the range of int64 and uint64"
            )
