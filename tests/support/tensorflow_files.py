"""Small SavedModels and GraphDefs, written field by field without TensorFlow."""

from collections.abc import Mapping, Sequence
from pathlib import Path

FLOAT, INT32, STRING, COMPLEX, BFLOAT16 = 1, 3, 7, 8, 14


def field(number: int, value: int | str | bytes) -> bytes:
    """One field: a varint for a number, else length-delimited."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def shape(sizes: Sequence[int] | None) -> bytes:
    if sizes is None:
        return field(3, 1)
    return b"".join(field(2, field(1, size)) for size in sizes)


def tensor(name: str, number: int, sizes: Sequence[int] | None) -> bytes:
    """A TensorInfo."""
    return field(1, f"{name}:0") + field(2, number) + field(3, shape(sizes))


def signature(inputs: Mapping[str, bytes], outputs: Mapping[str, bytes]) -> bytes:
    sides = ((1, inputs), (2, outputs))
    return b"".join(field(n, field(1, key) + field(2, info)) for n, side in sides for key, info in side.items())


def meta_graph(tags: Sequence[str], signatures: Mapping[str, bytes]) -> bytes:
    info = b"".join(field(4, tag) for tag in tags) + field(5, "2.21.0")
    return field(1, info) + b"".join(field(5, field(1, key) + field(2, value)) for key, value in signatures.items())


def saved_model(*graphs: bytes) -> bytes:
    return field(1, 1) + b"".join(field(2, graph) for graph in graphs)


DOUBLE = signature(
    {"x": tensor("serving_default_x", FLOAT, (-1, 4))}, {"y": tensor("StatefulPartitionedCall", FLOAT, (-1, 4))}
)


def write_saved_model(directory: Path, data: bytes) -> Path:
    directory.mkdir(parents=True)
    (directory / "saved_model.pb").write_bytes(data)
    return directory


def node(
    name: str, op: str, *inputs: str, number: int | None = None, sizes: Sequence[int] | bool | None = False
) -> bytes:
    """A NodeDef; `sizes` False for no attribute `shape`."""
    attributes = b""
    if number is not None:
        attributes += field(5, field(1, "dtype") + field(2, field(6, number)))
    if not isinstance(sizes, bool):
        attributes += field(5, field(1, "shape") + field(2, field(7, shape(sizes))))
    return field(1, name) + field(2, op) + b"".join(field(3, each) for each in inputs) + attributes


def graph(*nodes: bytes, version: int = 2000) -> bytes:
    return b"".join(field(1, each) for each in nodes) + field(4, field(1, version))
