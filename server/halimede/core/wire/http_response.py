"""Inference responses as HTTP bodies: JSON, or JSON with binary tensors behind it."""

from dataclasses import dataclass
from functools import lru_cache

import orjson

from halimede.core.config.model_view import ModelView
from halimede.core.types import DataType, InferenceResponse, internal
from halimede.core.types.tensor import Buffer
from halimede.core.wire.classification import classify_steps
from halimede.core.wire.destinations import BINARY, Destinations
from halimede.core.wire.json_limits import HALF, half_output
from halimede.core.wire.json_print import print_steps
from halimede.core.wire.steps import Steps, run

JOIN_BYTES = 64 << 10
"""A response up to this size is one chunk; of a larger one, chunks below a quarter of this are joined."""


@dataclass(slots=True)
class EncodedInfer:
    """A response body as chunks to write in order. `json_length` is set iff binary tensors follow the JSON part."""

    chunks: list[Buffer]
    json_length: int | None


def encode_infer(response: InferenceResponse, destinations: Destinations, view: ModelView) -> EncodedInfer:
    """Encode a response without error. INVALID_ARG for outputs that their destination cannot carry."""
    if len(response.outputs) == 1 and not response.parameters:
        sole = response.outputs[0]
        if destinations.of(sole.name) is BINARY:
            data = sole.data
            head = _sole_binary_json(
                response.model_name, response.model_version, sole.name, sole.datatype, sole.shape, len(data)
            )
            if response.id:
                head = b'{"id":%b,%b' % (orjson.dumps(response.id), head[1:])
            return EncodedInfer([head, data], len(head))
    return run(encode_infer_steps(response, destinations, view))


def encode_infer_steps(response: InferenceResponse, destinations: Destinations, view: ModelView) -> Steps[EncodedInfer]:
    """As `encode_infer`, in steps of at most about 10 ms each."""
    head = _model_json(response.model_name, response.model_version)
    head = b'{"id":%b,%b' % (orjson.dumps(response.id), head) if response.id else b"{" + head
    if response.parameters:
        head = b'%b,"parameters":%b' % (head, parameters_json(response, response.parameters))
    chunks: list[Buffer] = [head, b',"outputs":[']
    tails: list[Buffer] = []
    has_binary = False
    for number, answer in enumerate(response.outputs):
        destination = destinations.of(answer.name)
        output = answer
        if destination.classes:
            labels = view.labels.get(answer.name, ())
            output = yield from classify_steps(answer, destination.classes, labels, view.config.max_batch_size > 0)
        if number:
            chunks.append(b",")
        chunks.append(_output_json(output.name, output.datatype, output.shape))
        if destination.binary:
            has_binary = True
            chunks.append(b',"parameters":{"binary_data_size":%d}}' % len(output.data))
            tails.append(output.data)
            continue
        if output.datatype in HALF:
            raise half_output(output.name, output.datatype)
        chunks.append(b',"data":')
        chunks += yield from print_steps(output)
        chunks.append(b"}")
    chunks.append(b"]}")
    json_length = sum(map(len, chunks)) if has_binary else None
    return EncodedInfer(join_chunks(chunks + tails), json_length)


@lru_cache(maxsize=1024)
def _model_json(name: str, version: str) -> bytes:
    return b'"model_name":%b,"model_version":%b' % (orjson.dumps(name), orjson.dumps(version))


@lru_cache(maxsize=1024)
def _output_json(name: str, datatype: DataType, shape: tuple[int, ...]) -> bytes:
    return b'{"name":%b,"datatype":"%b","shape":%b' % (orjson.dumps(name), datatype.name.encode(), orjson.dumps(shape))


@lru_cache(maxsize=1024)
def _sole_binary_json(
    model: str, version: str, name: str, datatype: DataType, shape: tuple[int, ...], size_bytes: int
) -> bytes:
    """The JSON part of a response of one binary tensor. Responses to similar requests share it."""
    return b'{%b,"outputs":[%b,"parameters":{"binary_data_size":%d}}]}' % (
        _model_json(model, version),
        _output_json(name, datatype, shape),
        size_bytes,
    )


def parameters_json(response: InferenceResponse, value: object) -> bytes:
    """The parameters of a response, or the value of one; INTERNAL if JSON cannot represent it."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise internal(f"parameters of a response of model '{response.model_name}' are not JSON: {error}") from None


def join_chunks(chunks: list[Buffer]) -> list[Buffer]:
    """The chunks with runs of small ones joined; large ones stay as they are."""
    if sum(map(len, chunks)) <= JOIN_BYTES:
        return [b"".join(chunks)]
    joined: list[Buffer] = []
    small: list[Buffer] = []
    for chunk in chunks:
        if len(chunk) < JOIN_BYTES // 4:
            small.append(chunk)
            continue
        if small:
            joined.append(b"".join(small))
            small = []
        joined.append(chunk)
    if small:
        joined.append(b"".join(small))
    return joined
