"""Where the fuzzer begins: well-formed inputs of each target, from which it mutates."""

from typing import Any

import numpy as np

from halimede.backends.hosting import Answer, Reply
from halimede.backends.service_calls import LoadModel, NewMetric
from halimede.channel.frames import HEADER, ChannelFrame, encode_frame
from halimede.channel.json_frames import encode_blocks, json_frame
from halimede.core.types import Buffer, DataType, ErrorCode, InferenceError, InferenceRequest, Tensor
from halimede.core.wire.protocol import ModelInferRequest
from halimede.front_processes.asks import DEVICES, KV_CACHE, LOAD_MODEL, MODEL, REPOSITORY_INDEX, encode_ask
from halimede.inference_frames.calls import encode_infer
from halimede.inference_frames.kinds import CALL, TAKEN, InferenceFrame
from halimede.workers.frames.answers import encode_done, encode_response
from halimede.workers.frames.kinds import METRIC, WorkerFrame
from halimede.workers.frames.services import encode_service_call, service_call_frame
from support.tensorflow_files import DOUBLE, FLOAT, STRING, graph, meta_graph, node, saved_model

_JSON = (
    b'{"id":"a","parameters":{"k":1,"timeout":5},"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1.5,NaN]}]}',
    b'{"inputs":[{"name":"s","shape":[1,2],"datatype":"BYTES","data":["a\\u0000","\xc3\xa9"]}],"outputs":[{"name":"y"}]}',
    b'{"inputs":[{"name":"i","shape":[2,1],"datatype":"INT8","data":[[-128],[127]]}],"outputs":[{"name":"y",'
    b'"parameters":{"classification":2}}]}',
    b'{"inputs":[{"name":"u","shape":[1,1],"datatype":"UINT64","data":[18446744073709551615]},'
    b'{"name":"b","shape":[1,1],"datatype":"BOOL","data":[true]}]}',
)
_BINARY = b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","parameters":{"binary_data_size":8}}]}   '
assert len(_BINARY) % 8 == 0


def _message(**changes: object) -> bytes:
    message = ModelInferRequest(model_name="m", id="a")
    tensor = message.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    if changes.get("raw"):
        message.raw_input_contents.append(np.ones(2, np.float32).tobytes())
    else:
        tensor.contents.fp32_contents.extend([1.0, 2.0])
    strings = message.inputs.add(name="s", datatype="BYTES", shape=[1, 1])
    if changes.get("raw"):
        message.raw_input_contents.append(b"\1\0\0\0a")
    else:
        strings.contents.bytes_contents.append(b"a")
    message.outputs.add(name="y").parameters["classification"].int64_param = 1
    message.parameters["timeout"].int64_param = 7
    return bytes(message.SerializeToString())


_Y = Tensor("y", DataType.FP32, (1, 2), np.ones(2, np.float32).tobytes())
_S = Tensor("s", DataType.BYTES, (2,), b"\1\0\0\0a\0\0\0\0")
_STORED = Tensor("y", DataType.FP32, (5, 1024), bytes(20 << 10))
_OUTPUTS = {"y": 0, "s": 1}


def _store(data: Buffer) -> tuple[int, int] | None:
    return (1, 0) if len(data) == 20 << 10 else None


def _done(batch: int, replies: list[Reply], wanted: int = 0, retained: tuple[tuple[int, int], ...] = ()) -> bytes:
    done = encode_done(batch, replies, False, (1, 2, 3), _OUTPUTS, _store, lambda: (wanted, retained))
    return bytes(done)


def _response(key: int, reply: Reply, final: bool) -> bytes:
    return bytes(encode_response(key, reply, final, (4, 5), _OUTPUTS, _store))


def _infer(number: int, *inputs: Tensor, batch: int = 1, **fields: Any) -> bytes:
    request = InferenceRequest("m", inputs=list(inputs), **fields)
    return bytes(encode_infer(number, batch, request, _store, lambda: 0))


def _taken(number: int, count: int) -> bytes:
    return encode_frame(InferenceFrame.TAKEN, TAKEN.pack(number, count))


_CALL = service_call_frame(3, encode_service_call(NewMetric(1, {"a": "b"}, [1.5])))
_LOAD = service_call_frame(4, encode_service_call(LoadModel("m", "{}", {"file:1/model.py": b"pass"})))

_GRPC = b"\x83\x86\x44\x02/a\x40\x0ccontent-type\x10application/grpc"


def _h2(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _grpc(content: bytes) -> bytes:
    return b"\0" + len(content).to_bytes(4, "big") + content


def _zip(name: bytes) -> bytes:
    """An archive with one empty member."""
    member = b"PK\1\2" + bytes(24) + len(name).to_bytes(2, "little") + bytes(16) + name
    end = b"PK\5\6" + bytes(8) + len(member).to_bytes(4, "little") + (4).to_bytes(4, "little") + bytes(2)
    return b"PK\3\4" + member + end


SEEDS: dict[str, tuple[bytes, ...]] = {
    "model_file": (
        b"\x08\x0a\x3a\x05\x0a\x03abc\x42\x02\x10\x14",
        b"\x0a\x05\x0a\x01x\x12\x00\x22\x02\x08\x01",
        b"\x08\x01\x12\x02\x0a\x00",
        _zip(b"m/constants.pkl"),
        b'<?xml version="1.0"?><net name="m"></net>',
        b'{"learner":{},"version":[3,2,0]}',
        b"\x80\x04}\x94.",
        b"\4\0\0\0\x08\0\0\0\1\0\0\0\3\3\0\0",
    ),
    "http_framing": (
        b"\x03GET /v2 HTTP/1.1\r\nHost: a\r\n\r\nGET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x05POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhelloGET / HTTP/1.0\r\n\r\n",
        b"\x80POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nT: x\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x01POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 1\r\nConnection: close\r\n\r\nx",
    ),
    "http2_frames": (
        b"\xc0"
        + _h2(1, 4, 1, _GRPC)
        + _h2(0, 1, 1, _grpc(b"hello"))
        + _h2(1, 5, 3, b"\x83\x86\xbf\xbe")
        + _h2(6, 0, 0, bytes(8)),
        b"\x20"
        + _h2(4, 0, 0, b"\0\4\0\0\0\3\0\5\0\0\x40\0")
        + _h2(1, 0, 1, _GRPC[:9])
        + _h2(9, 4, 1, _GRPC[9:])
        + _h2(0, 8, 1, b"\2" + _grpc(b"longer") + b"\0\0")
        + _h2(8, 0, 1, b"\0\0\0\2")
        + _h2(8, 0, 0, b"\0\0\1\0")
        + _h2(4, 0, 0, b"\0\4\0\0\1\0")
        + _h2(1, 5, 1, b"\0\1a\1b"),
        b"\xc3"
        + _h2(1, 0x2D, 1, b"\1\0\0\0\0\0" + _GRPC + b"\0")
        + _h2(3, 0, 1, b"\0\0\0\x08")
        + _h2(0, 0, 1, b"late")
        + _h2(2, 0, 3, bytes(5))
        + _h2(1, 4, 3, b"\x83\x86\xbf\xbe\x0f\x0d\x013")
        + _h2(0, 1, 3, b"abc")
        + _h2(7, 0, 0, bytes(8)),
        b"\xd4"
        + _h2(1, 4, 1, _GRPC)
        + _h2(0, 0, 1, b"\0\0\1\0\0" + bytes(200))
        + _h2(6, 1, 0, b"shutdown")
        + _h2(1, 5, 9, _GRPC)
        + _h2(99, 1, 2, b"unknown")
        + _h2(0, 1, 1, b"rest"),
    ),
    "json_to_tensor": (
        *(b"\xff" + text for text in _JSON),
        bytes([len(_BINARY) // 8]) + _BINARY + bytes(8),
        b"\x00" + bytes(8),
    ),
    "generate_to_tensor": (
        b'\x00{"x":1.5,"i":[1,-2],"k":"v","id":"a","parameters":{"u":18446744073709551615,"n":2}}',
        b'\x10{"s":"a long text that is longer than a block \\" \xc3\xa9","b":[true,false],"x":[NaN,-Infinity]}',
        b'\x01{"x": NaN ,"s":["a","b"],"parameters":{"i":[0],"x2":null}}',
        b'\x05{"s":[[],"[{",{}],"i":[1,[2,3]],"t":"' + b"long " * 16 + b'"}',
    ),
    "pbtxt": (
        b'name: "m" backend: "identity" max_batch_size: 8\ninput [ { name: "IN" data_type: TYPE_FP32 dims: [ -1, 3 ] } ]\n'
        b"dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }\n",
        b'version_policy: { specific { versions: [ 1, 2 ] } } parameters { key: "k" value { string_value: "v\\n\\x01" } }\n'
        b"instance_group [ { kind: KIND_CPU count: 2 profile: 'p' } ] # a comment\n",
        b'optimization { graph { level: -1 } input_pinned_memory { enable: true } } metric_tags { key: "a" value: "b" };\n'
        b"sequence_batching < direct { } max_sequence_idle_microseconds: 5 >",
    ),
    "config_yaml": (
        b"name: m\nbackend: identity\nmax_batch_size: 8\ninput:\n  - {name: IN, data_type: TYPE_FP32, dims: [-1, 3]}\n"
        b"dynamic_batching: {preferred_batch_size: [4, 8], max_queue_delay_microseconds: 100}\n",
        b'version_policy: {specific: {versions: [1, 2]}}\nparameters:\n  k: {string_value: "v\\n\\x01"}\n  1: {}\n'
        b"instance_group:\n- kind: KIND_CPU # a comment\n  count: 2\n  profile: ['p']\nmetric_tags:\n  country: no\n",
        b"--- # one document\noptimization: {graph: {level: -1}}\nmodel_warmup: []\nbackend: >-\n  onnx\n  runtime\n...\n",
    ),
    "grpc_contents": (_message(raw=True), _message()),
    "worker_frames": (
        b"\x10" + _done(1, [Answer([_Y, _S], {"a": 1, "b": "c"}), InferenceError(ErrorCode.UNAVAILABLE, "no")]),
        b"\x40" + _done(2, [Answer([_STORED])], retained=((1, 0),)) + encode_blocks(ChannelFrame.UNUSED, [(1, 0)]),
        b"\x80"
        + _done(1, [None, Answer([_Y])], wanted=9)
        + _response(1, Answer([_S]), False)
        + _response(1, None, True),
        b"\x03" + _response(3, Answer([_STORED, _S]), True) + _done(2, [None]) + encode_frame(WorkerFrame.READY, b"\1"),
        b"\x21"
        + json_frame(ChannelFrame.STARTED, {"is_async": False})
        + encode_frame(WorkerFrame.LOG, b"\2hello")
        + _CALL
        + _LOAD,
        b"\x55"
        + json_frame(ChannelFrame.FAILED, {"code": "INTERNAL", "message": "no"})
        + encode_frame(WorkerFrame.STOPPED),
        b"\x07" + encode_frame(WorkerFrame.METRICS, METRIC.pack(1, 0, 1.5) + METRIC.pack(2, 2, -1)) + _CALL,
        b"\x19"
        + _infer(1, _Y, _S, id="a", outputs=("y",), parameters={"k": 1}, sequence_id="s", priority=2)
        + _taken(1, 1)
        + _infer(2, _STORED, batch=0, sequence_id=7, sequence_start=True)
        + encode_frame(InferenceFrame.CANCEL_CALL, CALL.pack(1))
        + _done(1, [None, None]),
    ),
    "asks": tuple(
        encode_ask(7, question, arguments)[HEADER.size :]
        for question, arguments in (
            *((MODEL, ("m", "1")), (KV_CACHE, ("größe",)), (REPOSITORY_INDEX, (True,)), (DEVICES, ())),
            (LOAD_MODEL, ("m", {"config": "{}", "file:1/m.onnx": b"\0\xff", "n": -3, "on": False})),
        )
    ),
    "tensorflow_files": (
        saved_model(meta_graph(["serve"], {"serving_default": DOUBLE, "other": DOUBLE}), meta_graph(["a", "b"], {})),
        graph(
            node("x", "Placeholder", number=FLOAT, sizes=(-1, 4)),
            node("any", "PlaceholderWithDefault", "x", number=STRING, sizes=None),
            node("y", "Add", "x:0", "^any"),
        ),
    ),
}
