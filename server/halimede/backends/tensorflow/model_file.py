"""Read what a SavedModel or a GraphDef says about its tensors, without TensorFlow.

The import of TensorFlow takes seconds and hundreds of megabytes, and a check of a configuration may not run a model's
code. The numbers are those of the fields in TensorFlow's `saved_model.proto`, `meta_graph.proto` and `graph.proto`.
"""

import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from halimede.backends.protobuf_fields import Data, Range, nested, signed, text, walk

PLACEHOLDERS = ("Placeholder", "PlaceholderV2")
OPTIONAL_PLACEHOLDER = "PlaceholderWithDefault"

_LEAST_RANKS_VERSION = 24
"""Graphs of an earlier version have a scalar's shape where the rank is unknown."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a signature. `name` is that in the signature, `tensor` that in the graph (`x:0`).

    `number` is the element type, as in `types.proto`; `shape` is None for an unknown rank. `encoding` is how a tensor
    that is not one array is stored (`sparse`, `composite`), "" for an array.
    """

    name: str
    tensor: str
    number: int
    shape: tuple[int, ...] | None
    encoding: str = ""


@dataclass(frozen=True, slots=True)
class Signature:
    """Tensors in the order of their names: the file has none."""

    inputs: tuple[FileTensor, ...]
    outputs: tuple[FileTensor, ...]


@dataclass(frozen=True, slots=True)
class MetaGraph:
    """One graph of a SavedModel, with its signatures by name."""

    tags: tuple[str, ...]
    signatures: Mapping[str, Signature]


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a frozen graph. `inputs` are as in the file: `x`, `x:1`, or `^x` for an order alone. `number` and
    `shape` are those of a placeholder."""

    op: str
    inputs: tuple[str, ...] = ()
    number: int = 0
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class FrozenGraph:
    """The nodes of a GraphDef by name, in the file's order."""

    nodes: Mapping[str, Node] = field(default_factory=dict)

    def placeholders(self) -> tuple[str, ...]:
        """The nodes that a caller feeds."""
        return tuple(name for name, node in self.nodes.items() if node.op in (*PLACEHOLDERS, OPTIONAL_PLACEHOLDER))

    def ends(self) -> tuple[str, ...]:
        """The nodes whose results no other node uses, without those that only hold or check something."""
        used = {node_of(each) for node in self.nodes.values() for each in node.inputs}
        others = ("Assert", "Const", "NoOp", *PLACEHOLDERS, OPTIONAL_PLACEHOLDER)
        return tuple(name for name, node in self.nodes.items() if name not in used and node.op not in others)

    def needed(self, outputs: tuple[str, ...], fed: frozenset[str]) -> tuple[str, ...]:
        """The placeholders without a default that these outputs (nodes or tensors) need when `fed` are given."""
        found: list[str] = []
        waiting, seen = [node_of(each) for each in outputs], set(fed)
        while waiting:
            name = waiting.pop()
            node = self.nodes.get(name)
            if name in seen or node is None:
                continue
            seen.add(name)
            if node.op in PLACEHOLDERS:
                found.append(name)
            waiting += [node_of(each) for each in node.inputs]
        return tuple(sorted(found))


def node_of(tensor: str) -> str:
    """The node of a tensor or of a node's input: `x` for `x`, `x:1` and `^x`."""
    return tensor.removeprefix("^").partition(":")[0]


def tensor_of(name: str) -> str:
    """The tensor of a name in a configuration: the first result of a node unless the name says which."""
    return name if ":" in name else f"{name}:0"


def read_saved_model(path: Path) -> tuple[MetaGraph, ...]:
    """The graphs of a `saved_model.pb`. ValueError if it is not one or is cut off, OSError if it cannot be read."""
    with _mapped(path) as data:
        return parse_saved_model(data)


def read_frozen_graph(path: Path) -> FrozenGraph:
    """The nodes of a GraphDef. ValueError if the file is not one or is cut off, OSError if it cannot be read."""
    with _mapped(path) as data:
        return parse_frozen_graph(data)


def parse_saved_model(data: Data) -> tuple[MetaGraph, ...]:
    """The graphs of a SavedModel message. ValueError."""
    return tuple(_meta_graph(data, at) for at in nested(data, (0, len(data)), 2))


def parse_frozen_graph(data: Data) -> FrozenGraph:
    """The nodes of a GraphDef message. ValueError."""
    nodes: dict[str, Node] = {}
    version = 0
    for number, start, stop in walk(data, 0, len(data)):
        if number == 1 and stop:
            name, node = _node(data, (start, stop))
            nodes[name] = node
        elif number == 4 and stop:  # GraphDef.versions
            version = next((value for key, value, _ in walk(data, start, stop) if key == 1), 0)
    if version < _LEAST_RANKS_VERSION:
        nodes = {
            name: Node(node.op, node.inputs, node.number, node.shape or None) if node.number else node
            for name, node in nodes.items()
        }
    return FrozenGraph(nodes)


@contextmanager
def _mapped(path: Path) -> Iterator[Data]:
    with path.open("rb") as file:
        if not file.seek(0, 2):
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


def _meta_graph(data: Data, at: Range) -> MetaGraph:
    tags = tuple(text(data, tag) for info in nested(data, at, 1) for tag in nested(data, info, 4))
    signatures = {key: _signature(data, value) for key, value in _entries(data, at, 5)}
    return MetaGraph(tags, dict(sorted(signatures.items())))


def _signature(data: Data, at: Range) -> Signature:
    sides = (tuple(sorted(_entries(data, at, number))) for number in (1, 2))
    inputs, outputs = (tuple(_tensor_info(data, name, value) for name, value in side) for side in sides)
    return Signature(inputs, outputs)


def _entries(data: Data, at: Range, number: int) -> Iterator[tuple[str, Range]]:
    """The keys and values of a map of messages."""
    for entry in nested(data, at, number):
        key = "".join(text(data, each) for each in nested(data, entry, 1))
        yield key, next(nested(data, entry, 2), (0, 0))


def _tensor_info(data: Data, name: str, at: Range) -> FileTensor:
    tensor, element, encoding = "", 0, ""
    shape: tuple[int, ...] | None = ()
    for number, start, stop in walk(data, *at):
        match number:
            case 1:
                tensor = text(data, (start, stop))
            case 2:
                element = start
            case 3:
                shape = _shape(data, (start, stop))
            case 4 | 5:
                encoding = "sparse" if number == 4 else "composite"
            case _:
                pass
    return FileTensor(name, tensor, element, shape, encoding)


def _shape(data: Data, at: Range) -> tuple[int, ...] | None:
    """A TensorShapeProto; None for an unknown rank."""
    sizes: list[int] = []
    for number, start, stop in walk(data, *at):
        if number == 2:
            size = next((signed(value) for key, value, end in walk(data, start, stop) if key == 1 and not end), 0)
            sizes.append(max(size, -1))
        elif number == 3 and start:
            return None
    return tuple(sizes)


def _node(data: Data, at: Range) -> tuple[str, Node]:
    name = op = ""
    inputs: list[str] = []
    attributes: list[Range] = []
    for number, start, stop in walk(data, *at):
        match number:
            case 1:
                name = text(data, (start, stop))
            case 2:
                op = text(data, (start, stop))
            case 3:
                inputs.append(text(data, (start, stop)))
            case 5:
                attributes.append((start, stop))
            case _:
                pass
    if op not in (*PLACEHOLDERS, OPTIONAL_PLACEHOLDER):
        return name, Node(op, tuple(inputs))
    element = 0
    shape: tuple[int, ...] | None = None
    for entry in attributes:
        key = "".join(text(data, each) for each in nested(data, entry, 1))
        for value in nested(data, entry, 2):
            if key == "dtype":
                element = next((kind for number, kind, end in walk(data, *value) if number == 6 and not end), 0)
            elif key == "shape":
                shape = next((_shape(data, each) for each in nested(data, value, 7)), None)
    return name, Node(op, tuple(inputs), element, shape)
