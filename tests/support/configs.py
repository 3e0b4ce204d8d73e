"""Model configurations for tests: strategies, edits that break their text, and the protocol's own parsers to compare with."""

import dataclasses
import functools
import math
import struct
import subprocess
import sys
import warnings
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Annotated, get_args, get_origin, get_type_hints

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from tritonclient.grpc import model_config_pb2

from halimede.core.config.model_config import ModelConfig
from halimede.core.types import DataType


def configuration(draws, message=ModelConfig):
    """Any ModelConfig that satisfies its type hints and oneofs."""
    hints = hints_of(message)
    names = set(draws.some(sorted(hints), 6)) if hints else ()
    for group in getattr(message, "ONEOFS", ()):
        names = [name for name in names if name not in group or name == min(set(group) & set(names))]
    return message(**{name: value(draws, hints[name]) for name in sorted(names)})


@functools.cache
def hints_of(message):
    return {
        name: hint for name, hint in get_type_hints(message, include_extras=True).items() if name in names_of(message)
    }


def value(draws, hint):
    if NoneType in get_args(hint):
        hint = get_args(hint)[0]
    origin, arms = get_origin(hint), get_args(hint)
    if origin is tuple:
        return tuple(value(draws, arms[0]) for _ in range(draws.below(4)))
    if origin is Mapping:
        return {value(draws, arms[0]): value(draws, arms[1]) for _ in range(draws.below(4))}
    if origin is Annotated:
        return draws.integer(*arms[1:])
    if hint is float:
        # Values that a 32-bit float and six digits represent exactly, so that the protocol's float fields keep them.
        return draws.pick((math.inf, -math.inf)) if draws.below(8) == 7 else draws.integer(-1000, 1000) / 8
    if hint in (bool, str):
        return draws.pick((False, True)) if hint is bool else draws.text(6)
    return draws.pick(tuple(hint)) if issubclass(hint, Enum) else configuration(draws, hint)


CONFIGURATION_BYTES = 300


PIECES = [
    *(bytes([byte]) for byte in b"{}<>[]:;,.#\"'\\-+_ \n\t\r\x00\x0b\x850123456789abefnuxTF\xff\xc3\xa9"),
    *(
        b"0x",
        b"\\x4",
        b"\\u00e9",
        b"\\777",
        b"true",
        b"inf",
        b"nan",
        b"name: 'x'",
        b"max_batch_size: 1",
        b" {}",
        b"#\n",
    ),
]


def edits_of(draws):
    def edit():
        piece = draws.pick(PIECES) if draws.below(2) else draws.below(1 << 16) / (1 << 16)
        return draws.below(1 << 16) / ((1 << 16) - 1), draws.pick((0, 0, 0, 1, 1, 2, 7)), piece

    return [edit() for _ in range(1 + draws.below(3))]


EDITS_BYTES = 32


def protocol_file():
    """Triton's own file of the configuration, from its client, with the field that only Halimede has."""
    file = descriptor_pb2.FileDescriptorProto()
    model_config_pb2.DESCRIPTOR.CopyToProto(file)
    ensembling = next(message for message in file.message_type if message.name == "ModelEnsembling")
    step = next(message for message in ensembling.nested_type if message.name == "Step")
    field = step.field.add(name="when", json_name="when", number=1000, proto3_optional=True)
    field.label, field.type = field.LABEL_OPTIONAL, field.TYPE_STRING
    field.oneof_index = len(step.oneof_decl)
    step.oneof_decl.add(name="_when")
    return file


_POOL = descriptor_pool.DescriptorPool()
_POOL.AddSerializedFile(protocol_file().SerializeToString())
_MODEL_CONFIG = message_factory.GetMessageClass(_POOL.FindMessageTypeByName("inference.ModelConfig"))


def new():
    return _MODEL_CONFIG()


def names_of(message):
    return [f.name for f in dataclasses.fields(message)]


def to_proto(value, into):
    """Convert Halimede's message to the protocol's, field by field."""
    for name in names_of(type(value)):
        inner, target = getattr(value, name), name.removesuffix("_")
        if inner is None:
            continue
        if isinstance(inner, tuple):
            for item in inner:
                if dataclasses.is_dataclass(item):
                    to_proto(item, getattr(into, target).add())
                else:
                    getattr(into, target).append(plain(item))
        elif isinstance(inner, Mapping):
            for key, item in inner.items():
                if dataclasses.is_dataclass(item):
                    to_proto(item, getattr(into, target)[key])
                else:
                    getattr(into, target)[key] = plain(item)
        elif dataclasses.is_dataclass(inner):
            getattr(into, target).SetInParent()
            to_proto(inner, getattr(into, target))
        else:
            setattr(into, target, plain(inner))
    return into


def plain(value):
    if isinstance(value, DataType):
        return value.number
    return value.value if isinstance(value, Enum) else value


def serialized(message):
    """Bytes, because messages with a NaN never compare equal."""
    return message.SerializeToString(deterministic=True)


def edited(text, edits):
    """The text with some bytes replaced. Positions, and starts of copied pieces, are fractions of the length."""
    for where, cut, piece in edits:
        at = int(where * len(text))
        added = text[int(piece * len(text)) :][:20] if isinstance(piece, float) else piece
        text = text[:at] + added + text[at + cut :]
    return text


def parsed_by_text_format(text):
    with warnings.catch_warnings():
        # text_format reads strings as Python does, and Python warns about unknown escapes.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return text_format.Parse(text, new())
        # ParseError, ValueError or UnicodeError, depending on what is wrong.
        except Exception:
            return None


def has_nameless_enum(message):
    for f, value in message.ListFields():
        if f.message_type is not None and f.message_type.GetOptions().map_entry:
            held = [v for v in value.values() if not isinstance(v, str)]
        else:
            held = value if f.is_repeated else [value]
        if f.enum_type is not None and any(number not in f.enum_type.values_by_number for number in held):
            return True
        if f.message_type is not None and any(has_nameless_enum(inner) for inner in held):
            return True
    return False


class Protoc:
    """The C++ reader of the text format, which is Triton's too: protoc in a process that forks for each text."""

    def __init__(self, directory: Path) -> None:
        described = descriptor_pb2.FileDescriptorSet()
        described.file.append(protocol_file())
        path = directory / "set.pb"
        path.write_bytes(described.SerializeToString())
        arguments = [f"--descriptor_set_in={path}", "--deterministic_output", "--encode=inference.ModelConfig"]
        command = [sys.executable, "-c", _PROTOC, *arguments, described.file[0].name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def encoded(self, text: bytes) -> bytes | None:
        """The message in wire format; None if the text is refused."""
        self.process.stdin.write(struct.pack("<I", len(text)) + text)
        self.process.stdin.flush()
        (size,) = struct.unpack("<i", self.process.stdout.read(4))
        return self.process.stdout.read(size) if size >= 0 else None

    def close(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait(30) == 0


_PROTOC = """
import os, struct, sys, tempfile
from grpc_tools import _protoc_compiler

arguments = [b"protoc", *(argument.encode() for argument in sys.argv[1:])]
with open(os.devnull, "wb") as nowhere:
    while header := sys.stdin.buffer.read(4):
        with tempfile.TemporaryFile(buffering=0) as given, tempfile.TemporaryFile(buffering=0) as made:
            given.write(sys.stdin.buffer.read(*struct.unpack("<I", header)))
            given.seek(0)
            child = os.fork()
            if child == 0:
                os.dup2(given.fileno(), 0)
                os.dup2(made.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
                os._exit(_protoc_compiler.run_main(arguments))
            _, status = os.waitpid(child, 0)
            made.seek(0)
            answer = struct.pack("<i", -1) if status else struct.pack("<i", os.fstat(made.fileno()).st_size) + made.read()
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()
"""
