"""The bytes of small model files of each kind, without the libraries that write them."""

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Sequence

import onnx
from onnx import TensorProto, helper

from halimede.core.repository.file_kinds import FileKind


class Bytes:
    """The content of a file that counts what is read of it."""

    def __init__(self, content: bytes) -> None:
        self.size = len(content)
        self.reads = 0
        self.most = 0
        self._content = content

    def at(self, offset: int, length: int) -> bytes:
        self.reads += 1
        self.most += length
        return self._content[offset : offset + length]


def archive(names: Sequence[str], comment: bytes = b"") -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.comment = comment
        for name in names:
            file.writestr(name, b"content")
    return made.getvalue()


def zip64(names: Sequence[str], short: tuple[int, int] = (0xFFFFFFFF,) * 2, announced: int | None = None) -> bytes:
    """An archive whose directory's place is in the records for large archives, as torch writes large ones.

    `short` is its length and offset in the record of small archives, `announced` the place of the large record.
    """
    content = archive(names)
    at = content.rindex(b"PK\x05\x06")
    count, length, offset = struct.unpack_from("<H2I", content, at + 10)
    large = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, offset)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, at if announced is None else announced, 1)
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, *short, 0)
    return content[:at] + large + locator + end


def onnx_model(opset: int = 20, ir_version: int = 10) -> bytes:
    def info(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 2])

    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [info("x")], [info("y")])
    opsets = [helper.make_opsetid("", opset)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=ir_version).SerializeToString())


def field(number: int, content: bytes) -> bytes:
    """A field of a protobuf message; short contents only."""
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


GRAPHDEF = field(1, field(1, b"x") + field(2, b"Placeholder")) + field(1, field(1, b"y")) + field(4, b"\x08\x01")
TORCHSCRIPT = ("m/data.pkl", "m/code/__torch__.py", "m/constants.pkl", "m/version")
UBJSON = b"{L\0\0\0\0\0\0\0\x07learner{}L\0\0\0\0\0\0\0\x07version[#L\0\0\0\0\0\0\0\x03i\x03i\x02i\0}"
XML = b'<?xml version="1.0"?>\n<net name="m" version="11">\n<layers/>\n</net>\n'

SAMPLES: dict[str, tuple[FileKind, bytes]] = {
    "onnx": (FileKind.ONNX, onnx_model()),
    "ort": (FileKind.ORT, b"\x18\0\0\0ORTM" + bytes(64)),
    "torchscript": (FileKind.TORCHSCRIPT, archive(TORCHSCRIPT)),
    "torchscript with a comment": (FileKind.TORCHSCRIPT, archive(TORCHSCRIPT, b"c" * 60_000)),
    "large torchscript": (FileKind.TORCHSCRIPT, zip64(TORCHSCRIPT)),
    "torch.export": (FileKind.TORCH_EXPORT, archive(["m/archive_format", "m/models/model.json"])),
    "old torch.export": (FileKind.TORCH_EXPORT, archive(["serialized_exported_program.json", "version"])),
    "aoti": (FileKind.AOTI, archive(["m/archive_format", "m/data/aotinductor/model/model.so"])),
    "torch.save": (FileKind.TORCH_SAVE, archive(["m/data.pkl", "m/data/0", "m/version"])),
    "old torch.save": (FileKind.TORCH_SAVE, b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."),
    "plan": (FileKind.TENSORRT, b"ftrt" + bytes(64)),
    "openvino": (FileKind.OPENVINO, XML),
    "graphdef": (FileKind.GRAPHDEF, GRAPHDEF),
    "saved_model.pb": (FileKind.SAVED_MODEL_FILE, b"\x08\x01" + field(2, b"\x0a\x00")),
    "tflite": (FileKind.TFLITE, b"\x1c\0\0\0TFL3" + bytes(64)),
    "keras": (FileKind.KERAS, archive(["metadata.json", "config.json", "model.weights.h5"])),
    "h5": (FileKind.HDF5, b"\x89HDF\r\n\x1a\n" + bytes(64)),
    "xgboost json": (FileKind.XGBOOST_JSON, b'{"learner":{"attributes":{}},"version":[3,2,0]}'),
    "xgboost ubj": (FileKind.XGBOOST_UBJ, UBJSON),
    "xgboost binary": (FileKind.XGBOOST_BINARY, b"binf" + bytes(64)),
    "lightgbm": (FileKind.LIGHTGBM, b"tree\nversion=v4\nTree=0\nend of trees\n\nend of parameters\n"),
    "treelite": (FileKind.TREELITE, struct.pack("<3i2B", 4, 8, 1, 3, 3) + bytes(64)),
    "pickle": (FileKind.PICKLE, pickle.dumps({"a": 1})),
    "pickle of protocol 0": (FileKind.PICKLE, pickle.dumps({"a": 1}, 0)),
    "pickled class of protocol 0": (FileKind.PICKLE, pickle.dumps(zipfile.ZipFile, 0)),
    "compressed joblib": (FileKind.COMPRESSED, zlib.compress(pickle.dumps({"a": 1}))),
    "skops": (FileKind.SKOPS, archive(["schema.json"])),
    "pmml": (FileKind.PMML, b'<?xml version="1.0"?><PMML version="4.4"></PMML>'),
    "safetensors": (FileKind.SAFETENSORS, struct.pack("<Q", 2) + b"{}"),
    "gguf": (FileKind.GGUF, b"GGUF" + bytes(64)),
    "npy": (FileKind.NUMPY, b"\x93NUMPY\x01\0"),
    "elf": (FileKind.SHARED_LIBRARY, b"\x7fELF" + bytes(64)),
    "zip": (FileKind.ZIP, archive(["readme.txt"])),
    "lfs": (FileKind.LFS_POINTER, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
    "html": (FileKind.HTML, b"<!DOCTYPE html>\n<html><body>404</body></html>"),
    "empty": (FileKind.EMPTY, b""),
    "text": (FileKind.UNKNOWN, b"hello, world\n"),
    "zeros": (FileKind.UNKNOWN, bytes(100)),
    "other json": (FileKind.UNKNOWN, b'{"factor": 3}'),
    "other xml": (FileKind.UNKNOWN, b'<?xml version="1.0"?><svg/>'),
}
"""Kind and content, by what it is."""
