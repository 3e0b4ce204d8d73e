"""The decoder of a model remembers the JSON parts of binary requests."""

import orjson
import pytest

from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput
from halimede.core.config.model_view import ModelView
from halimede.core.types import DataType, InferenceError
from halimede.core.wire.http_request import InferDecoder, decode_infer


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


def test_cached_json_part_with_wrong_binary_part_is_refused() -> None:
    tensor = {"name": "IN", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    text = orjson.dumps({"inputs": [tensor]})
    view = decoder_view()
    decoder = InferDecoder(view, "")
    assert decoder.decode(text + b"\0" * 8, len(text)).request.inputs[0].data == b"\0" * 8
    for payload in (b"", b"\0" * 7, b"\0" * 9):
        with pytest.raises(InferenceError) as known:
            decoder.decode(text + payload, len(text))
        with pytest.raises(InferenceError) as fresh:
            decode_infer(view, text + payload, len(text))
        assert known.value == fresh.value


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
