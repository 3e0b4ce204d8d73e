"""JSON bodies may begin with the byte order mark of UTF-8, as C# and PowerShell write it."""

import codecs
import json

from halimede.core.wire.generate import decode_generate
from halimede.core.wire.http_control import decode_index_request, decode_load_request, decode_unload_request
from halimede.core.wire.http_request import InferDecoder, decode_infer
from support.inference_bodies import VIEW, asking, floats, tensor

MARK = codecs.BOM_UTF8


def test_inference_requests_of_any_size() -> None:
    for count in (2, 40_000):
        document = asking(tensor(shape=[count], data=[1.5] * count), id="i")
        assert decode_infer(VIEW, MARK + document, None) == decode_infer(VIEW, document, None)


def test_the_json_part_of_a_binary_request() -> None:
    document = asking(tensor(data=..., parameters={"binary_data_size": 8}))
    header = MARK + document
    decoder = InferDecoder(VIEW, "1")
    # Another time it is a known header.
    for _ in range(2):
        decoded = decoder.decode(header + floats(3, 4), len(header))
        assert decoded == decoder.decode(document + floats(3, 4), len(document))


def test_generate_requests_of_any_size() -> None:
    for count in (4, 40_000):
        document = json.dumps({"x": [0.5] * 4, "prompt": "w" * count}).encode()
        assert decode_generate(VIEW, MARK + document) == decode_generate(VIEW, document)


def test_control_calls() -> None:
    assert decode_index_request(MARK + b'{"ready":true}')
    assert decode_unload_request(MARK + b'{"parameters":{"unload_dependents":true}}')
    assert decode_load_request(MARK + b'{"parameters":{"config":"{}"}}') == {"config": "{}"}
    assert not decode_index_request(MARK)
