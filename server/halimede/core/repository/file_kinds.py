"""What kind of model file this is, by its name and a few of its bytes. Pure; nothing of the file is executed.

A format is recognized by its signature: magic bytes, the members of an archive, the first fields of a protobuf message.
A file that fits none is UNKNOWN, which is no error: its runtime decides. The bytes that are read are bounded: the head,
the end, the directory of an archive, and the heads of at most MOST_FIELDS fields.
"""

import re
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

HEAD_BYTES = 4096
END_BYTES = (1 << 16) + 128
"""The end of a zip archive: its comment has up to 64 KiB, and further records are before it."""
DIRECTORY_BYTES = 1 << 20
"""Maximum bytes of an archive's directory that are read; about ten thousand members."""
MOST_FIELDS = 20_000


class FileKind(Enum):
    """The kinds of files that are recognized. The value is for error texts, with its article."""

    EMPTY = "an empty file"
    EMPTY_DIRECTORY = "an empty directory"
    LFS_POINTER = "a pointer of Git LFS"
    HTML = "an HTML page"
    ONNX = "an ONNX model"
    ONNX_DIRECTORY = "a directory with an ONNX model"
    ORT = "a model in ONNX Runtime's own format"
    TORCHSCRIPT = "a TorchScript archive"
    TORCH_EXPORT = "an archive of torch.export"
    AOTI = "a package of AOTInductor"
    TORCH_SAVE = "a checkpoint of torch.save, which is a pickle"
    TENSORRT = "a TensorRT engine"
    OPENVINO = "an OpenVINO model"
    SAVED_MODEL = "a SavedModel directory"
    SAVED_MODEL_FILE = "the saved_model.pb of a SavedModel directory"
    GRAPHDEF = "a TensorFlow graph"
    TFLITE = "a TensorFlow Lite model"
    KERAS = "a Keras archive"
    HDF5 = "an HDF5 file, such as Keras weights"
    XGBOOST_JSON = "an XGBoost model in JSON"
    XGBOOST_UBJ = "an XGBoost model in UBJSON"
    XGBOOST_BINARY = "an XGBoost model in its deprecated binary format"
    LIGHTGBM = "a LightGBM model"
    TREELITE = "a Treelite checkpoint"
    PICKLE = "a pickle"
    COMPRESSED = "compressed data, such as a compressed pickle"
    SKOPS = "a skops archive"
    PMML = "a PMML document"
    SAFETENSORS = "a safetensors file"
    GGUF = "a GGUF file"
    NUMPY = "a NumPy array"
    SHARED_LIBRARY = "a shared library"
    ZIP = "a zip archive"
    PYTHON = "a Python program"
    UNKNOWN = "a file of an unknown format"


@dataclass(frozen=True, slots=True)
class Look:
    """What a file looks like.

    `fault` is why it cannot be a complete file of its kind. `doubt` is why a reader of this archive may find something
    else in it, as a clause. Both are "" if nothing is wrong.
    """

    kind: FileKind
    fault: str = ""
    doubt: str = ""


class Content(Protocol):
    """The bytes of a file."""

    size: int

    def at(self, offset: int, length: int) -> bytes:
        """At most `length` bytes from there; fewer at the end of the file."""


def look_at_directory(names: Collection[str]) -> Look:
    """The kind of a model that is a directory with these names."""
    if not names:
        return Look(FileKind.EMPTY_DIRECTORY)
    if {"saved_model.pb", "saved_model.pbtxt"} & set(names):
        return Look(FileKind.SAVED_MODEL)
    return Look(FileKind.ONNX_DIRECTORY if "model.onnx" in names else FileKind.UNKNOWN)


def is_served_alone(names: Collection[str]) -> bool:
    """Whether a directory with these names is the file of a model, and not a model directory or a repository."""
    return look_at_directory(names).kind in (FileKind.SAVED_MODEL, FileKind.ONNX_DIRECTORY)


def look_at_file(name: str, content: Content) -> Look:
    """The kind of a file, and whether it is complete as far as its format shows that."""
    if content.size == 0:
        return Look(FileKind.EMPTY)
    head = content.at(0, HEAD_BYTES)
    for is_of, kind in _SIGNATURES:
        if is_of(head):
            return Look(kind)
    if head.startswith(_ZIP):
        return _archive(content)
    if head[:1] in (b"{", b"[") and b"learner" in head[:64]:
        return _xgboost(head, content)
    if _is_xml(head):
        return _xml(head, content)
    if head.startswith(b"tree\n"):
        # Behind this line there may be any amount of parameters.
        is_cut = content.size <= END_BYTES and b"end of trees" not in _end(content)
        return Look(FileKind.LIGHTGBM, _cut("its line 'end of trees'") if is_cut else "")
    if _is_pickle(head):
        return Look(FileKind.PICKLE)
    if name.endswith(".py") and b"\0" not in head:
        return Look(FileKind.PYTHON)
    return _protobuf(content)


_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_TORCH_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_PICKLE_TEXT = re.compile(rb"c[A-Za-z_][\w.]*\n[A-Za-z_]\w*\n|\((?:dp|lp|[ilc])")
_HTML = re.compile(rb"\s*<(?:!doctype\s+html|html)[\s>]", re.IGNORECASE)


def _is_treelite(head: bytes) -> bool:
    """Its head is its version, as three numbers, then the types of thresholds and leaves."""
    if len(head) < 14:
        return False
    major, minor, patch = struct.unpack("<3i", head[:12])
    return 3 <= major <= 9 and 0 <= minor < 100 and 0 <= patch < 100 and head[12] in (1, 2, 3) and head[13] in (1, 2, 3)


def _is_safetensors(head: bytes) -> bool:
    return len(head) > 9 and head[8:9] == b"{" and 0 < int.from_bytes(head[:8], "little") < 100 << 20


_SIGNATURES = (
    (lambda head: head.startswith(b"version https://git-lfs.github.com/spec/"), FileKind.LFS_POINTER),
    (lambda head: _HTML.match(head) is not None, FileKind.HTML),
    (lambda head: head.startswith((b"ftrt", b"ptrt", b"trtf")), FileKind.TENSORRT),
    (lambda head: head[4:8] == b"ORTM", FileKind.ORT),
    (lambda head: head[4:8] == b"TFL3", FileKind.TFLITE),
    (lambda head: head.startswith(b"\x89HDF\r\n\x1a\n"), FileKind.HDF5),
    (lambda head: head.startswith(b"GGUF"), FileKind.GGUF),
    (lambda head: head.startswith(b"\x93NUMPY"), FileKind.NUMPY),
    (lambda head: head.startswith((b"\x7fELF", b"MZ\x90", b"\xcf\xfa\xed\xfe")), FileKind.SHARED_LIBRARY),
    (lambda head: head.startswith((b"binf", b"bs64")), FileKind.XGBOOST_BINARY),
    (lambda head: head.startswith(_TORCH_LEGACY), FileKind.TORCH_SAVE),
    (_is_treelite, FileKind.TREELITE),
    (_is_safetensors, FileKind.SAFETENSORS),
    # zlib, gzip, bzip2, xz, lzma and lz4: all that joblib writes.
    (
        lambda head: head.startswith(
            (b"x\x01", b"x^", b"x\x9c", b"x\xda", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"]\x00\x00", b'\x04"M\x18')
        ),
        FileKind.COMPRESSED,
    ),
)


def _is_pickle(head: bytes) -> bool:
    return (head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")) or (
        _PICKLE_TEXT.match(head) is not None
    )


def _end(content: Content) -> bytes:
    return content.at(max(0, content.size - END_BYTES), END_BYTES)


def _cut(lacks: str) -> str:
    return f"it lacks {lacks}: it is incomplete"


# ---- text formats


def _is_xml(head: bytes) -> bool:
    return head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"<?xml", b"<net ", b"<PMML"))


def _xml(head: bytes, content: Content) -> Look:
    if b"<PMML" in head:
        return Look(FileKind.PMML)
    if b"<net " not in head:
        return Look(FileKind.UNKNOWN)
    return Look(FileKind.OPENVINO, "" if b"</net>" in _end(content) else _cut("its end, '</net>'"))


def _xgboost(head: bytes, content: Content) -> Look:
    # A JSON document has a quotation mark or white space behind its brace, UBJSON the type of the first key's length.
    kind = FileKind.XGBOOST_JSON if head[1:2] in b'" \t\r\n' else FileKind.XGBOOST_UBJ
    return Look(kind, "" if _end(content).rstrip().endswith(b"}") else _cut("its last '}'"))


# ---- zip archives


def archive_kinds(names: Collection[str]) -> list[FileKind]:
    """What PyTorch's loaders find in an archive with these members: first what is loaded. Empty if there is nothing.

    The backend uses this, too, so that it never loads as one kind what was allowed as another.
    """
    # torch puts all members below one folder, whose name is that of the saved file.
    inside = {*names, *(name.partition("/")[2] for name in names)}
    is_package = "archive_format" in inside
    is_script = "constants.pkl" in inside and any(name.startswith("code/") for name in inside)
    found = {
        FileKind.AOTI: is_package and any(name.startswith("data/aotinductor/") for name in inside),
        FileKind.TORCH_EXPORT: "serialized_exported_program.json" in inside
        or (is_package and any(name.startswith("models/") for name in inside)),
        FileKind.TORCHSCRIPT: is_script,
        FileKind.TORCH_SAVE: "data.pkl" in inside and not is_script,
    }
    return [kind for kind, is_there in found.items() if is_there]


def _archive(content: Content) -> Look:
    location = _directory_location(content)
    if location is None:
        return Look(FileKind.ZIP, _cut("the directory at the end of every zip archive"))
    if location.offset + location.length > content.size:
        return Look(FileKind.ZIP, _cut("a part of the archive's directory"))
    names, doubt = _member_names(content.at(location.offset, min(location.length, DIRECTORY_BYTES)))
    if location.length > DIRECTORY_BYTES:
        doubt = f"its directory has {location.length} bytes, of which {DIRECTORY_BYTES} are read"
    elif not location.is_plain:
        doubt = "its directory is not where all readers look for it"
    kinds = archive_kinds(names)
    if len(kinds) > 1:
        doubt = f"it is {kinds[1].value}, too"
    return Look(kinds[0] if kinds else _other_archive_kind(names), doubt=doubt)


@dataclass(frozen=True, slots=True)
class _Location:
    """Of an archive's directory. It `is_plain` if readers that look in different ways agree on it."""

    offset: int
    length: int
    is_plain: bool


def _directory_location(content: Content) -> _Location | None:
    """None without a record of the directory at the end."""
    end = _end(content)
    at = end.rfind(b"PK\x05\x06")
    if at < 0 or len(end) - at < 22:
        return None
    length, offset = short = struct.unpack_from("<2I", end, at + 12)
    has_locator = end[max(0, at - 20) :].startswith(b"PK\x06\x07")
    records, is_plain = at, not has_locator
    # Python uses the record of large archives whenever it is there, others only if they must.
    if has_locator and end[max(0, at - 76) :].startswith(b"PK\x06\x06"):
        records = at - 76
    elif 0xFFFFFFFF in short:
        records = end.rfind(b"PK\x06\x06", 0, max(0, at - 55))
        if records < 0:
            return None
    if records < at:
        length, offset = struct.unpack_from("<2Q", end, records + 40)
        (announced,) = struct.unpack_from("<Q", end, at - 12)
        is_plain = has_locator and records == at - 76 and announced == content.size - len(end) + records
        is_plain &= all(one in (0xFFFFFFFF, other) for one, other in zip(short, (length, offset), strict=True))
    # Python also reads archives that have other bytes before them, and takes the directory that ends here.
    is_plain &= offset + length == content.size - len(end) + records
    return _Location(offset, length, is_plain)


def _member_names(directory: bytes) -> tuple[Sequence[str], str]:
    """The names, and why a reader may find others."""
    names, at = [], 0
    while directory[at : at + 4] == b"PK\x01\x02" and at + 46 <= len(directory):
        name, extra, comment = struct.unpack_from("<3H", directory, at + 28)
        names.append(directory[at + 46 : at + 46 + name].decode("utf-8", "replace"))
        at += 46 + name + extra + comment
    if any("\0" in name for name in names):
        return names, "readers cut a name in it"
    return names, "" if at == len(directory) else "its directory is damaged"


def _other_archive_kind(names: Collection[str]) -> FileKind:
    if "schema.json" in names:
        return FileKind.SKOPS
    return FileKind.KERAS if {"config.json", "model.weights.h5"} <= set(names) else FileKind.ZIP


# ---- protobuf messages


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of a message: its number, its wire type, where its content begins, and the length or the value of it."""

    number: int
    wire: int
    start: int
    value: int


_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def _protobuf(content: Content) -> Look:
    """ONNX and TensorFlow models have no magic bytes: the types of their first fields are their signature."""
    try:
        fields, is_whole = _fields(content)
    except ValueError:
        return Look(FileKind.UNKNOWN)
    kind = _message_kind(fields, content)
    if kind is FileKind.UNKNOWN or is_whole:
        return Look(kind)
    return Look(kind, _cut("bytes that its fields announce"))


_ONNX_FIELDS = {1: _VARINT, 2: _BYTES, 3: _BYTES, 4: _BYTES, 5: _VARINT, 6: _BYTES, 7: _BYTES, 8: _BYTES, 14: _BYTES}
_GRAPHDEF_FIELDS = {1: _BYTES, 2: _BYTES, 3: _VARINT, 4: _BYTES, 5: _BYTES}


def _message_kind(fields: list[_Field], content: Content) -> FileKind:
    if not fields:
        return FileKind.UNKNOWN
    first = fields[0]
    is_onnx = all(_ONNX_FIELDS.get(each.number, _BYTES) == each.wire for each in fields)
    if is_onnx and any(each.number == 7 for each in fields) and all(each.number < 32 for each in fields):
        return FileKind.ONNX
    if (first.number, first.wire, first.value) == (1, _VARINT, 1) and {each.number for each in fields} <= {1, 2}:
        return FileKind.SAVED_MODEL_FILE
    is_graph = all(_GRAPHDEF_FIELDS.get(each.number) == each.wire for each in fields)
    # The first field of a node is its name.
    if is_graph and first.number == 1 and content.at(first.start, 1) == b"\x0a":
        return FileKind.GRAPHDEF
    return FileKind.UNKNOWN


def _fields(content: Content) -> tuple[list[_Field], bool]:
    """The first fields of the outermost message, and whether the file has all bytes of them. ValueError if this is not
    a message."""
    fields: list[_Field] = []
    at = 0
    while at < content.size and len(fields) < MOST_FIELDS:
        head = content.at(at, 20)
        try:
            tag, used = _varint(head, 0)
            wire = tag & 7
            value, used = _varint(head, used) if wire in (_VARINT, _BYTES) else (0, used)
        except EOFError:
            return fields, False
        number = tag >> 3
        if number == 0 or wire not in (_VARINT, _FIXED64, _BYTES, _FIXED32):
            raise ValueError("not a field")
        fields.append(_Field(number, wire, at + used, value))
        at += used + {_VARINT: 0, _FIXED64: 8, _BYTES: value, _FIXED32: 4}[wire]
    return fields, at <= content.size


def _varint(head: bytes, at: int) -> tuple[int, int]:
    """The number there, and the position behind it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(head):
            raise EOFError
        byte = head[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than ten bytes")
