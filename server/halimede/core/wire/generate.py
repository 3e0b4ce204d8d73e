"""`generate` and `generate_stream`: requests and responses as flat JSON objects with the model's own names.

A member with the name of an input is that input: a value, or a list of values. Its datatype and shape are those of the
configuration; variable dimensions follow from the number of values. Every other member is a parameter of the request;
members of the object `parameters` count as if they were top-level members, and `id` is the request's id. Only names
that begin with `triton_` are reserved: the model reads `priority` or `timeout` itself, as in Triton, whose error texts
these are. If an object repeats a name its first value counts, but a repeated input is an error.

A document of at most `SMALL_JSON_BYTES` is parsed at once, a larger one in steps.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, nan, prod
from typing import Any

import orjson

from halimede.core.config.model_config import ModelInput
from halimede.core.config.model_view import ModelView
from halimede.core.types import InferenceError, InferenceRequest, InferenceResponse, ParameterValue, Tensor
from halimede.core.types.error import clip, invalid
from halimede.core.types.kv_cache import KvCache
from halimede.core.types.tensor import Buffer
from halimede.core.wire.destinations import ALL_JSON
from halimede.core.wire.forwarding import RESERVED_PREFIX
from halimede.core.wire.http_request import SMALL_JSON_BYTES, reserved_parameter
from halimede.core.wire.http_response import join_chunks, parameters_json
from halimede.core.wire.json_access import parameter_value, without_mark
from halimede.core.wire.json_array import pack, pack_steps
from halimede.core.wire.json_limits import HALF, check_outputs, half_input, half_output
from halimede.core.wire.json_print import print_steps
from halimede.core.wire.json_scan import (
    BLOCK_BYTES,
    JSON_SPACE,
    MAX_SKELETON_BYTES,
    ScannedJson,
    check_depth,
    load_json,
    malformed,
    scan_steps,
)
from halimede.core.wire.steps import Steps, run

NOT_ONE_RESPONSE = invalid(
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number"
    " of responses"
)

LOAD_FORMATS = (b"text", b"json")
"""The valid values of `endpoint-load-metrics-format`."""

# Placeholders for these tokens in a document that is parsed without them; null stands for NaN.
_INFINITY = [None]
_MINUS_INFINITY = [None, None]


# ---- Requests


def decode_generate(view: ModelView, body: Buffer, version: str = "") -> InferenceRequest:
    """Decode the request in a body. INVALID_ARG for an invalid one."""
    return run(decode_generate_steps(view, body, version))


def decode_generate_steps(view: ModelView, body: Buffer, version: str = "") -> Steps[InferenceRequest]:
    """As `decode_generate`, in steps of at most about 10 ms each."""
    body = without_mark(body)
    if len(body) <= SMALL_JSON_BYTES:
        return decode_small(view, body, version)
    return (yield from decode_large_steps(view, body, version))


def decode_small(view: ModelView, body: Buffer, version: str = "") -> InferenceRequest:
    """Decode a document at once."""
    raw = bytes(body)
    if not raw.strip(JSON_SPACE):
        raise malformed("The document is empty", 0)
    check_depth(raw)
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError:
        # JSON has no such tokens, but Triton accepts them in data.
        if b"NaN" in raw or b"Infinity" in raw:
            return run(decode_large_steps(view, raw, version))
        document = load_json(raw)
    return run(_read_steps(_with_repeated(raw, document), view, version, _Parsed()))


class _Repeating(dict[str, Any]):
    """An object with repeated names: the first value of each, and all members in order as `pairs`."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(reversed(pairs))
        self.pairs = pairs


def _with_repeated(text: bytes, document: Any) -> Any:
    """The document parsed from `text`, parsed again if its objects may repeat names."""
    if not isinstance(document, dict):
        return document
    names = len(document) + sum(len(value) for value in document.values() if isinstance(value, dict))
    # Each member has a colon. Strings may contain colons too.
    if text.count(b":") == names:
        return document
    return json.loads(text, object_pairs_hook=_object, parse_int=_number)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    return members if len(members) == len(pairs) else _Repeating(pairs)


def _number(digits: str) -> int | float:
    """As orjson does: a number that is not a 64-bit integer becomes a double."""
    value = int(digits) if len(digits) <= 20 else float(digits)
    return value if -(2**63) <= value < 2**64 else float(value)


def _members(document: dict[str, Any], inputs: Mapping[str, ModelInput]) -> Iterable[tuple[str, Any]]:
    """The members that count: the first of each name, but every one with an input's name."""
    if not isinstance(document, _Repeating):
        return document.items()
    seen: set[str] = set()
    members = []
    for name, value in document.pairs:
        if name in inputs or name not in seen:
            members.append((name, value))
        seen.add(name)
    return members


def decode_large_steps(
    view: ModelView,
    body: Buffer,
    version: str = "",
    block_bytes: int = BLOCK_BYTES,
    skeleton_limit: int = MAX_SKELETON_BYTES,
) -> Steps[InferenceRequest]:
    """Decode a document in steps, with the same result as `decode_small`.

    Apart from its inputs and white space it may have `skeleton_limit` bytes.
    """
    layout = yield from scan_steps(body, block_bytes, skeleton_limit, members=True)
    text, has_tokens = _without_tokens(layout.skeleton)
    document = _with_repeated(text, load_json(text))
    yield 0
    request = yield from _read_steps(document, view, version, _Scanned(layout, has_tokens))
    # A repeated member counts once, but its other value must be valid JSON too.
    yield from layout.rest_steps()
    return request


_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"|-?Infinity|NaN|null', re.DOTALL)


def _without_tokens(skeleton: bytes) -> tuple[bytes, bool]:
    """The skeleton with placeholders for NaN, Infinity and -Infinity, and whether it had any of them.

    Lists and null can be placeholders: the arrays were already taken out, and null is an error in any place.
    """
    if b"NaN" not in skeleton and b"Infinity" not in skeleton:
        return skeleton, False
    words = {match[0] for match in _TOKEN.finditer(skeleton)}
    if words.isdisjoint((b"NaN", b"Infinity", b"-Infinity")):
        return skeleton, False
    if b"null" in words:
        raise invalid("Unable to parse 'data': attempt to access JSON non-number as double")
    stands = {b"NaN": b"null", b"Infinity": orjson.dumps(_INFINITY), b"-Infinity": orjson.dumps(_MINUS_INFINITY)}
    return _TOKEN.sub(lambda match: stands.get(match[0], match[0]), skeleton), True


class _Parsed:
    """Values of a document that was parsed whole."""

    def count_steps(self, value: Any) -> Steps[int]:
        yield from ()
        return len(value) if type(value) is list else 1

    def data_steps(self, declared: ModelInput, count: int, value: Any) -> Steps[Buffer]:
        yield from ()
        return pack(declared.name, declared.data_type, count, value if type(value) is list else [value])

    def plain(self, value: Any) -> Any:
        return value


@dataclass(slots=True)
class _Scanned:
    """Values of a document whose arrays and long strings were taken out; a list of one number refers to a span."""

    layout: ScannedJson
    has_tokens: bool

    def count_steps(self, value: Any) -> Steps[int]:
        """The number of values, counting a nested list as one."""
        span = _span(value)
        if span is None or (commas := self.layout.commas[span]) is None:
            return 1
        if commas:
            return commas + 1
        opened, closed = self.layout.spans[span]
        for at in range(opened + 1, closed, self.layout.block_bytes):
            if bytes(self.layout.view[at : min(at + self.layout.block_bytes, closed)]).strip(JSON_SPACE):
                return 1
            yield 0
        return 0

    def data_steps(self, declared: ModelInput, count: int, value: Any) -> Steps[Buffer]:
        name, datatype, span = declared.name, declared.data_type, _span(value)
        if span is None:
            return pack(name, datatype, count, [self._scalar(value)])
        self.layout.unread.discard(span)
        return (yield from pack_steps(name, datatype, count, self.layout, span))

    def plain(self, value: Any) -> Any:
        """A value that is not an input's: a long string is restored; an array stays out, as no array is valid there."""
        span = _span(value)
        if span is None or self.layout.commas[span] is not None:
            return value
        return run(self.layout.parse_steps(span))

    def _scalar(self, value: Any) -> Any:
        if not self.has_tokens:
            return value
        return nan if value is None else inf if value == _INFINITY else -inf if value == _MINUS_INFINITY else value


def _span(value: Any) -> int | None:
    """The index of the span that this value of a skeleton stands for, None if it is not a placeholder."""
    if type(value) is list and type(value[0]) is int:
        span: int = value[0]
        return span
    return None


def _read_steps(document: Any, view: ModelView, version: str, source: _Parsed | _Scanned) -> Steps[InferenceRequest]:
    if not isinstance(document, dict):
        raise invalid("attempt to get members for non-object")
    inputs = {each.name: each for each in view.config.input}
    reader = _Reader(view, inputs, source)
    request_id = ""
    if "id" in document and "id" not in inputs:
        request_id = _text(source.plain(document["id"]))
    for key, value in _members(document, inputs):
        if key == "parameters":
            yield from _nested_steps(reader, value)
        elif key != "id" or key in inputs:
            yield from reader.member_steps(key, value)
    request = InferenceRequest(view.name, version, request_id, reader.tensors, parameters=reader.parameters)
    check_outputs(view, request, ALL_JSON)
    return request


def _nested_steps(reader: "_Reader", members: Any) -> Steps[None]:
    if "parameters" in reader.inputs:
        raise invalid("Keyword 'parameters' for nested schema also given as input tensor name")
    if not isinstance(members, dict):
        raise invalid("Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object")
    try:
        for key, value in _members(members, reader.inputs):
            yield from reader.member_steps(key, value)
    except InferenceError as error:
        raise InferenceError(error.code, f"Converting keyword: 'parameters': {error.message}") from None


@dataclass(slots=True)
class _Reader:
    """Reads the members of a request."""

    view: ModelView
    inputs: dict[str, ModelInput]
    source: _Parsed | _Scanned
    tensors: list[Tensor] = field(default_factory=list)
    parameters: dict[str, ParameterValue] = field(default_factory=dict)

    def member_steps(self, key: str, value: Any) -> Steps[None]:
        declared = self.inputs.get(key)
        if declared is None:
            if key.startswith(RESERVED_PREFIX):
                raise reserved_parameter()
            self.parameters[key] = self._parameter(key, self.source.plain(value))
            return
        if declared.data_type in HALF:
            raise half_input(key, declared.data_type)
        count = yield from self.source.count_steps(value)
        shape = tensor_shape(declared, self.view.config.max_batch_size > 0, count)
        data = yield from self.source.data_steps(declared, count, value)
        self.tensors.append(Tensor(key, declared.data_type, shape, data))

    def _parameter(self, key: str, value: Any) -> ParameterValue:
        try:
            return parameter_value(key, value)
        except InferenceError as error:
            if not isinstance(value, list):
                raise
            # A list is probably meant for an input.
            names = ", ".join(f"'{clip(name)}'" for name in self.inputs)
            text = f"{error.message} The inputs of model '{self.view.name}' are {clip(names)}."
            raise InferenceError(error.code, text) from None


def tensor_shape(declared: ModelInput, batches: bool, count: int) -> tuple[int, ...]:
    """The shape of an input with `count` values. INVALID_ARG if no shape fits.

    `count` must be divisible by the fixed dimensions. The quotient becomes the innermost variable dimension, and the
    other variable ones are 1; the batch dimension counts as the outermost variable one.
    """
    dims = (-1, *declared.dims) if batches else declared.dims
    fixed = prod(dim for dim in dims if dim >= 0)
    rest, odd = divmod(count, fixed) if fixed else (count, 0)
    open_dims = [at for at, dim in enumerate(dims) if dim < 0]
    if odd or (rest != 1 and not open_dims):
        raise invalid(f"The schema can not convert input '{clip(declared.name)}' to tensor with proper shape")
    innermost = open_dims[-1] if open_dims else -1
    return tuple(dim if dim >= 0 else rest if at == innermost else 1 for at, dim in enumerate(dims))


def _text(value: Any) -> str:
    if type(value) is not str:
        raise invalid("Unable to parse 'id': attempt to access JSON non-string as string")
    return value


# ---- Responses


def encode_generate_steps(response: InferenceResponse) -> Steps[list[Buffer]]:
    """Encode a response without error as a JSON object with its members in alphabetical order, in chunks.

    An output of one element is a single value, any other output a flat list. INVALID_ARG for values that JSON cannot
    represent.
    """
    members: dict[str, list[Buffer]] = {
        key: [parameters_json(response, value)] for key, value in response.parameters.items()
    }
    for output in response.outputs:
        if output.datatype in HALF:
            raise half_output(output.name, output.datatype)
        chunks = yield from print_steps(output)
        members[output.name] = _unwrapped(chunks) if prod(output.shape) == 1 else chunks
    members["model_name"] = [orjson.dumps(response.model_name)]
    members["model_version"] = [orjson.dumps(response.model_version)]
    if response.id:
        members["id"] = [orjson.dumps(response.id)]
    body: list[Buffer] = []
    for name in sorted(members):
        body += (b"," if body else b"{", orjson.dumps(name), b":", *members[name])
    body.append(b"}")
    return join_chunks(body)


def _unwrapped(chunks: list[Buffer]) -> list[Buffer]:
    """An array of one element without its brackets, the first and the last character."""
    if len(chunks) == 1:
        return [chunks[0][1:-1]]
    return [chunks[0][1:], *chunks[1:-1]]


def load_metrics(form: bytes, cache: KvCache) -> bytes:
    """The value of `endpoint-load-metrics`, in one of `LOAD_FORMATS`."""
    if form == b"json":
        named = {"kv_cache_utilization": cache.utilization, "max_token_capacity": cache.max_tokens}
        return b"JSON " + orjson.dumps({"named_metrics": named})
    return (
        f"TEXT named_metrics.kv_cache_utilization={cache.utilization:.6f}, "
        f"named_metrics.max_token_capacity={cache.max_tokens}"
    ).encode()
