"""The decoder of a model remembers the JSON parts of binary requests."""

import json
from collections.abc import Callable
from typing import NamedTuple

import orjson
import pytest
from hypothesis import given

from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput
from halimede.core.config.model_view import ModelView
from halimede.core.types import DataType, InferenceError
from halimede.core.wire.http_request import DecodedInfer, InferDecoder, decode_infer
from support.examples import Draws, drawn
from support.refusals import error_of


def test_cached_json_part_decodes_as_the_first_time() -> None:
    tensor = {"name": "IN", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    plain = orjson.dumps({"inputs": [tensor], "outputs": [{"name": "OUT", "parameters": {"binary_data": True}}]})
    named = orjson.dumps({"id": "7", "inputs": [tensor]})
    listed = orjson.dumps({"parameters": {"binary_data_output": True, "x": 1}, "inputs": [tensor]})
    view = decoder_view()
    decoder = InferDecoder(view, "1")
    for text in (plain, named, listed):
        for payload in (b"\0" * 8, b"\1" * 8):
            for _ in range(2):
                assert decoder.decode(text + payload, len(text)) == decode_infer(view, text + payload, len(text), "1")


VALUES = ("", "a", "7", "x-1_Z", 'q"', "back\\slash", "ü", "line\n", "\u2028", 0, 5, 2**64 - 1, 2**70, -1, None)
KEYS = ("sequence_id", "sequence_start", "sequence_end", "id", "priority", "timeout", "binary_data_output", "x")
BOOLS = (False, True)


class Part(NamedTuple):
    request_id: object
    parameters: list[tuple[str, object]]
    of_input: list[tuple[str, object]]
    is_spaced: bool
    is_twice: bool


def parameters_of(draws: Draws) -> list[tuple[str, object]]:
    return [(draws.pick(KEYS), draws.pick(VALUES if draws.below(2) else BOOLS)) for _ in range(draws.below(5))]


def part_of(draws: Draws) -> Part:
    return Part(draws.pick(VALUES), parameters_of(draws), parameters_of(draws), draws.pick(BOOLS), draws.pick(BOOLS))


@given(drawn(lambda draws: [part_of(draws) for _ in range(2 + draws.below(11))], 250))
def test_parts_with_varying_ids_and_sequences_decode_as_the_first_time(parts: list[Part]) -> None:
    view = decoder_view()
    decoder = InferDecoder(view, "1")
    for request_id, parameters, of_input, is_spaced, is_twice in parts:
        # Repeated keys are legal JSON: dictionaries would drop them.
        members = [f'"id":{json.dumps(request_id)}', f'"parameters":{{{pairs(parameters)}}}']
        tensor = (
            f'"name":"IN","shape":[1,2],"datatype":"FP32","parameters":{{"binary_data_size":8{pairs(of_input, ",")}}}'
        )
        members += [f'"inputs":[{{{tensor}}}]', *members[: 2 * is_twice]]
        text = ("{" + (", " if is_spaced else ",").join(members) + "}").encode()
        for _ in range(2):
            body = text + b"\1" * 8
            fresh = outcome(lambda body, length: decode_infer(view, body, length, "1"), body, len(text))
            assert outcome(decoder.decode, body, len(text)) == fresh


def outcome(decode: Callable[[bytes, int], DecodedInfer], body: bytes, header_length: int) -> object:
    try:
        return decode(body, header_length)
    except InferenceError as error:
        return error.code, error.message


def test_parts_that_differ_in_id_and_sequence_are_remembered_once() -> None:
    view = decoder_view()
    decoder = InferDecoder(view, "1")
    for number in range(1, 9):
        text = (
            b'{"id":"%d","parameters":{"sequence_id":%d,"sequence_start":true},"inputs":[{"name":"IN","datatype":"FP32",'
            b'"shape":[1,2],"parameters":{"binary_data_size":8}}]}' % (number, number)
        )
        request = decoder.decode(text + b"\0" * 8, len(text)).request
        assert (request.id, request.sequence_id) == (str(number), number)
        assert (request.sequence_start, request.sequence_end) == (True, False)
        assert len(decoder.known) == 1


def test_a_part_with_the_number_of_its_sequence_left_out_is_refused() -> None:
    view = decoder_view()
    decoder = InferDecoder(view, "1")
    tensors = b'"inputs":[{"name":"IN","datatype":"FP32","shape":[1,2],"parameters":{"binary_data_size":8}}]}'
    valid, invalid = (b'{"parameters":{"sequence_id":%s},' % number + tensors for number in (b"5", b""))
    for _ in range(2):
        assert decoder.decode(valid + b"\0" * 8, len(valid)).request.sequence_id == 5
        with pytest.raises(InferenceError, match="failed to parse the request JSON buffer"):
            decoder.decode(invalid + b"\0" * 8, len(invalid))


def pairs(members: list[tuple[str, object]], lead: str = "") -> str:
    return "".join(
        f"{lead if at == 0 else ','}{json.dumps(key)}:{json.dumps(value)}" for at, (key, value) in enumerate(members)
    )


def test_cached_json_part_with_wrong_binary_part_is_refused() -> None:
    tensor = {"name": "IN", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    text = orjson.dumps({"inputs": [tensor]})
    view = decoder_view()
    decoder = InferDecoder(view, "")
    assert decoder.decode(text + b"\0" * 8, len(text)).request.inputs[0].data == b"\0" * 8
    for payload in (b"", b"\0" * 7, b"\0" * 9):
        error = error_of(decoder.decode, text + payload, len(text))
        assert error == error_of(decode_infer, view, text + payload, len(text))


def test_json_part_with_data_is_decoded_each_time() -> None:
    view = decoder_view()
    decoder = InferDecoder(view, "")
    for value in (1.0, 2.0):
        text = b'{"inputs":[{"name":"IN","shape":[1,2],"datatype":"FP32","data":[%.1f,0.0]}]}' % value
        for _ in range(2):
            assert decoder.decode(text, len(text)).request.inputs[0].array().tolist() == [[value, 0.0]]


def test_cache_of_json_parts_is_bounded() -> None:
    view = decoder_view()
    decoder = InferDecoder(view, "")
    tensor = {"name": "IN", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    sizes = []
    for number in range(300):
        text = orjson.dumps({"inputs": [tensor]}) + b" " * number
        decoder.decode(text + b"\0" * 8, len(text))
        sizes.append(len(decoder.known))
    assert max(sizes) <= 64


def decoder_view() -> ModelView:
    config = ModelConfig(
        name="m",
        max_batch_size=8,
        input=(ModelInput(name="IN", data_type=DataType.FP32, dims=(2,)),),
        output=(ModelOutput(name="OUT", data_type=DataType.FP32, dims=(2,)),),
    )
    return ModelView("m", "1", ("1",), config, {})
