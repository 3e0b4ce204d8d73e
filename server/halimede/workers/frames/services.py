"""SERVICE_CALL and SERVICE_RESULT: requests of a model's code other than inferences, and their results.

| frame | body |
|---|---|
| SERVICE_CALL | the number of the call, one byte for the kind of call, its fields in order |
| SERVICE_RESULT | the number of the call, one byte for the kind of result, the result |

A text or a file is its length in four bytes and its bytes; a mapping is the number of its entries in four bytes, then
each key and its value.
"""

import struct
from collections.abc import Iterable
from typing import Any

from halimede.backends.service_calls import (
    METRIC_KINDS,
    DeleteMetricFamily,
    IsModelReady,
    LoadModel,
    MetricValue,
    NewMetric,
    NewMetricFamily,
    ServiceCall,
    ServiceResult,
    TakeState,
    UnloadModel,
)
from halimede.channel.frames import MAX_CONTROL_BYTES, MAX_TEXT_BYTES, FrameError, encode_frame
from halimede.core.types import Buffer, InferenceError
from halimede.inference_frames.kinds import ERROR_CODES, ERROR_NUMBERS, describe_decode_error
from halimede.inference_frames.texts import encode_text
from halimede.workers.frames.kinds import WorkerFrame

MAX_ENTRIES = 100_000
"""Maximum files, labels or buckets of one call: reading them blocks the server's loop."""

_NUMBER = struct.Struct("<I")
_CALL_HEAD = struct.Struct("<IB")
_RESULT_HEAD = struct.Struct("<IB")
_ID = struct.Struct("<Q")
_BOOL = struct.Struct("<?")
_BYTE = struct.Struct("<B")
_FLOAT = struct.Struct("<d")

_LOAD_MODEL, _UNLOAD_MODEL, _IS_MODEL_READY = 1, 2, 3
_NEW_FAMILY, _DELETE_FAMILY, _NEW_METRIC, _METRIC_VALUE, _TAKE_STATE = 4, 5, 6, 7, 8
"""The kind of call in a SERVICE_CALL frame."""

_NOTHING, _TRUTH, _INTEGER, _REAL, _ERROR = 0, 1, 2, 3, 4
"""The kind of result in a SERVICE_RESULT frame."""


def encode_service_call(call: ServiceCall[ServiceResult]) -> bytes:
    """The part of a SERVICE_CALL's body after the number of the call. ValueError if it is too large."""
    match call:
        case LoadModel(model_name, config, files):
            _check_count(len(files), "files")
            entries = [part for name, content in files.items() for part in (_text(name), _data(content))]
            which, parts = _LOAD_MODEL, [_text(model_name), _text(config), _NUMBER.pack(len(files)), *entries]
        case UnloadModel(model_name, unload_dependents):
            which, parts = _UNLOAD_MODEL, [_text(model_name), _BOOL.pack(unload_dependents)]
        case IsModelReady(model_name, model_version):
            which, parts = _IS_MODEL_READY, [_text(model_name), _text(model_version)]
        case NewMetricFamily(name, description, kind):
            which, parts = _NEW_FAMILY, [_text(name), _text(description), _BYTE.pack(METRIC_KINDS.index(kind))]
        case DeleteMetricFamily(family):
            which, parts = _DELETE_FAMILY, [_ID.pack(family)]
        case NewMetric(family, labels, buckets):
            _check_count(len(labels), "labels")
            _check_count(len(buckets), "buckets")
            texts = [_text(text) for label in labels.items() for text in label]
            which, parts = _NEW_METRIC, [_ID.pack(family), _NUMBER.pack(len(labels)), *texts, _floats(buckets)]
        case MetricValue(metric):
            which, parts = _METRIC_VALUE, [_ID.pack(metric)]
        case TakeState(size_bytes):
            which, parts = _TAKE_STATE, [_ID.pack(size_bytes)]
        case _:
            raise TypeError(f"{type(call).__name__} has no number in the codec")
    size = _CALL_HEAD.size + sum(map(len, parts))
    if size > MAX_CONTROL_BYTES:
        raise ValueError(f"its arguments take {size} bytes, at most {MAX_CONTROL_BYTES} are taken")
    return b"".join((_BYTE.pack(which), *parts))


def service_call_frame(number: int, encoded: bytes) -> bytes:
    """The SERVICE_CALL frame of an encoded call."""
    return encode_frame(WorkerFrame.SERVICE_CALL, _NUMBER.pack(number) + encoded)


def decode_service_call(body: Buffer) -> tuple[int, ServiceCall[ServiceResult]]:
    """Decode the body of a SERVICE_CALL in the server: the number of the call, and the call. FrameError."""
    fields = _Fields(body)
    try:
        number, which = fields.take(_CALL_HEAD)
        call = _read_call(which, fields)
    except (struct.error, ValueError, IndexError) as error:
        raise FrameError(f"SERVICE_CALL: {describe_decode_error(error)}") from error
    fields.check_end()
    return number, call


def _read_call(which: int, fields: "_Fields") -> ServiceCall[ServiceResult]:
    if which == _LOAD_MODEL:
        name, config = fields.text(), fields.text()
        return LoadModel(name, config, {fields.text(): fields.data() for _ in range(fields.count())})
    if which == _UNLOAD_MODEL:
        return UnloadModel(fields.text(), fields.take(_BOOL)[0])
    if which == _IS_MODEL_READY:
        return IsModelReady(fields.text(), fields.text())
    if which == _NEW_FAMILY:
        return NewMetricFamily(fields.text(), fields.text(), METRIC_KINDS[fields.take(_BYTE)[0]])
    if which == _DELETE_FAMILY:
        return DeleteMetricFamily(*fields.take(_ID))
    if which == _NEW_METRIC:
        (family,) = fields.take(_ID)
        labels = {fields.text(): fields.text() for _ in range(fields.count())}
        return NewMetric(family, labels, [fields.take(_FLOAT)[0] for _ in range(fields.count())])
    if which == _METRIC_VALUE:
        return MetricValue(*fields.take(_ID))
    if which == _TAKE_STATE:
        return TakeState(*fields.take(_ID))
    raise ValueError(f"call {which}, which does not exist")


def encode_service_result(number: int, result: ServiceResult | InferenceError) -> bytes:
    """A SERVICE_RESULT frame."""
    if result is None:
        which, data = _NOTHING, b""
    elif isinstance(result, bool):
        which, data = _TRUTH, _BOOL.pack(result)
    elif isinstance(result, int):
        which, data = _INTEGER, _ID.pack(result)
    elif isinstance(result, float):
        which, data = _REAL, _FLOAT.pack(result)
    else:
        which, data = _ERROR, _BYTE.pack(ERROR_NUMBERS[result.code]) + encode_text(result.message)[:MAX_TEXT_BYTES]
    return encode_frame(WorkerFrame.SERVICE_RESULT, _RESULT_HEAD.pack(number, which) + data)


def decode_service_result(body: Buffer) -> tuple[int, ServiceResult | InferenceError]:
    """Decode the body of a SERVICE_RESULT in the worker: the call's number and its result. Not checked."""
    number, which = _RESULT_HEAD.unpack_from(body)
    data = bytes(body[_RESULT_HEAD.size :])
    if which == _ERROR:
        return number, InferenceError(ERROR_CODES[data[0]], str(data[1:], "utf-8", "replace"))
    if which == _NOTHING:
        return number, None
    layout = {_TRUTH: _BOOL, _INTEGER: _ID, _REAL: _FLOAT}[which]
    result: bool | int | float = layout.unpack(data)[0]
    return number, result


class _Fields:
    """Reads the fields of a body one after the other. struct.error and ValueError for a field beyond the end."""

    def __init__(self, body: Buffer) -> None:
        self._body = memoryview(body)
        self._at = 0

    def take(self, layout: struct.Struct) -> tuple[Any, ...]:
        values = layout.unpack_from(self._body, self._at)
        self._at += layout.size
        return values

    def data(self) -> bytes:
        (length,) = self.take(_NUMBER)
        start, self._at = self._at, self._at + length
        if self._at > len(self._body):
            raise ValueError("a description that ends too early")
        return bytes(self._body[start : self._at])

    def text(self) -> str:
        return str(self.data(), "utf-8")

    def count(self) -> int:
        count: int = self.take(_NUMBER)[0]
        if count > MAX_ENTRIES:
            raise ValueError(f"more than {MAX_ENTRIES} entries")
        return count

    def check_end(self) -> None:
        """FrameError if there are bytes after the last field."""
        if self._at != len(self._body):
            raise FrameError(f"SERVICE_CALL: {len(self._body) - self._at} bytes after the last field")


def _text(value: str) -> bytes:
    return _data(encode_text(value))


def _data(value: bytes) -> bytes:
    return _NUMBER.pack(len(value)) + value


def _floats(values: Iterable[float]) -> bytes:
    packed = [_FLOAT.pack(value) for value in values]
    return _NUMBER.pack(len(packed)) + b"".join(packed)


def _check_count(count: int, what: str) -> None:
    if count > MAX_ENTRIES:
        raise ValueError(f"{count} {what}, at most {MAX_ENTRIES} are taken")
