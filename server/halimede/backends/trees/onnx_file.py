"""A forest as the bytes of an ONNX model with one TreeEnsembleRegressor, which computes the sums of all outputs. Pure.

ONNX Runtime runs forests two to four times as fast as Treelite's own interpreter. The few messages of the format are
written here, because the package `onnx` is large and its converters need the training libraries.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halimede.backends.trees.forest import EQ, GE, GT, LE, LT, MOST_CATEGORY, Forest

INPUT, OUTPUT = "input", "sums"

MODES = {LT: b"BRANCH_LT", LE: b"BRANCH_LEQ", EQ: b"BRANCH_EQ", GT: b"BRANCH_GT", GE: b"BRANCH_GTE"}
LEAF = b"LEAF"

NO_CATEGORY = -1.0
"""What `instance` passes for values that are no category; no node tests for it."""

_NEVER = -2.0

_FLOAT, _DOUBLE = 1, 11
_ATTRIBUTE_INT, _ATTRIBUTE_TENSOR, _ATTRIBUTE_INTS, _ATTRIBUTE_STRINGS = 2, 4, 7, 8


@dataclass(slots=True)
class _Nodes:
    """Arrays of ONNX's nodes: one per node of the forest, then further ones for categories."""

    tree: NDArray[np.int64]
    number: NDArray[np.int64]
    feature: NDArray[np.int64]
    mode: NDArray[np.int64]
    value: NDArray[np.float64]
    when_true: NDArray[np.int64]
    when_false: NDArray[np.int64]
    missing_is_true: NDArray[np.int64]


def onnx_bytes(forest: Forest) -> bytes:
    """The model: input [rows, features] and output [rows, outputs], of base scores and sums or averages.

    The input is FP64 where the file has thresholds of that type, else FP32; the output is FP32.
    """
    kind = _DOUBLE if forest.is_double else _FLOAT
    nodes = _with_category_chains(forest, _plain_nodes(forest))
    leaves = _leaf_attributes(forest)
    modes = {**MODES, 0: LEAF}
    attributes = [
        _int("n_targets", forest.outputs),
        _ints("nodes_treeids", nodes.tree),
        _ints("nodes_nodeids", nodes.number),
        _ints("nodes_featureids", nodes.feature),
        _strings("nodes_modes", [modes[each] for each in nodes.mode.tolist()]),
        _tensor("nodes_values_as_tensor", nodes.value, kind),
        _ints("nodes_truenodeids", nodes.when_true),
        _ints("nodes_falsenodeids", nodes.when_false),
        _ints("nodes_missing_value_tracks_true", nodes.missing_is_true),
        _ints("target_treeids", leaves[0]),
        _ints("target_nodeids", leaves[1]),
        _ints("target_ids", leaves[2]),
        _tensor("target_weights_as_tensor", leaves[3], kind),
        _tensor("base_values_as_tensor", forest.base_scores, kind),
    ]
    node = b"".join(
        (
            _text(1, INPUT),
            _text(2, OUTPUT),
            _text(4, "TreeEnsembleRegressor"),
            *(_field(5, attribute) for attribute in attributes),
            _text(7, "ai.onnx.ml"),
        )
    )
    graph = b"".join(
        (
            _field(1, node),
            _text(2, "forest"),
            _field(11, _value_info(INPUT, kind, forest.features)),
            _field(12, _value_info(OUTPUT, _FLOAT, forest.outputs)),
        )
    )
    opsets = ("", 17), ("ai.onnx.ml", 3)
    return b"".join(
        (_number(1, 8), _field(7, graph), *(_field(8, _text(1, domain) + _number(2, of)) for domain, of in opsets))
    )


def _plain_nodes(forest: Forest) -> _Nodes:
    leaf = forest.is_leaf
    tree = forest.tree_of_node()
    return _Nodes(
        tree=tree,
        number=np.arange(len(tree)) - forest.starts[tree],
        feature=np.where(leaf, 0, forest.nodes.feature).astype(np.int64),
        mode=np.where(leaf, 0, forest.nodes.comparison).astype(np.int64),
        value=_thresholds(forest),
        when_true=np.where(leaf, 0, forest.nodes.left).astype(np.int64),
        when_false=np.where(leaf, 0, forest.nodes.right).astype(np.int64),
        missing_is_true=(forest.nodes.default_left & ~leaf).astype(np.int64),
    )


def _thresholds(forest: Forest) -> NDArray[np.float64]:
    return np.where(forest.is_leaf | forest.nodes.is_categorical, 0, forest.nodes.threshold)


def _with_category_chains(forest: Forest, nodes: _Nodes) -> _Nodes:
    """Each test for several categories as a chain of tests for one; the true branches lead to the same child."""
    added: list[tuple[int, int, int, float, int, int, int]] = []
    sizes = np.diff(forest.starts).tolist()
    for at in np.flatnonzero(forest.nodes.is_categorical & ~forest.is_leaf).tolist():
        found = forest.categories[forest.nodes.category_start[at] : forest.nodes.category_stop[at]]
        values = [float(each) for each in np.unique(found[found <= MOST_CATEGORY]).tolist()] or [_NEVER]
        hit, miss = int(forest.nodes.left[at]), int(forest.nodes.right[at])
        missing_is_hit = bool(forest.nodes.default_left[at])
        if forest.nodes.category_right[at]:
            hit, miss, missing_is_hit = miss, hit, not missing_is_hit
        tree = int(nodes.tree[at])
        feature, missing = int(forest.nodes.feature[at]), int(missing_is_hit)
        first = sizes[tree]
        sizes[tree] += len(values) - 1
        nexts = [*range(first, sizes[tree]), miss]
        nodes.mode[at], nodes.value[at] = EQ, values[0]
        nodes.when_true[at], nodes.when_false[at], nodes.missing_is_true[at] = hit, nexts[0], missing
        for position, value in enumerate(values[1:]):
            added.append((tree, nexts[position], feature, value, hit, nexts[position + 1], missing))
    if not added:
        return nodes
    tree_ids, numbers, features, values_, trues, falses, missings = (
        np.array(each) for each in zip(*added, strict=True)
    )
    joined = _Nodes(
        np.concatenate([nodes.tree, tree_ids]),
        np.concatenate([nodes.number, numbers]),
        np.concatenate([nodes.feature, features]),
        np.concatenate([nodes.mode, np.full(len(added), EQ)]),
        np.concatenate([nodes.value, values_]),
        np.concatenate([nodes.when_true, trues]),
        np.concatenate([nodes.when_false, falses]),
        np.concatenate([nodes.missing_is_true, missings]),
    )
    order = np.argsort(joined.tree, kind="stable")
    return _Nodes(*(getattr(joined, name)[order] for name in _Nodes.__slots__))


def _leaf_attributes(
    forest: Forest,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Tree, node, output and value of everything that a leaf adds."""
    factors = forest.weights()
    leaf = forest.is_leaf
    trees, nodes, outputs, values = [], [], [], []
    for tree in range(forest.trees):
        start, stop = forest.starts[tree], forest.starts[tree + 1]
        here = np.flatnonzero(leaf[start:stop])
        ids = forest.output_ids(tree)
        at = forest.nodes.leaf_start[start + here][:, None] + np.arange(len(ids))
        trees.append(np.full(at.size, tree))
        nodes.append(np.repeat(here, len(ids)))
        outputs.append(np.tile(ids, len(here)))
        values.append((forest.leaf_values[at] * factors[ids]).reshape(-1))
    return np.concatenate(trees), np.concatenate(nodes), np.concatenate(outputs), np.concatenate(values)


def _value_info(name: str, kind: int, columns: int) -> bytes:
    shape = _field(1, _text(2, "rows")) + _field(1, _number(1, columns))
    return _text(1, name) + _field(2, _field(1, _number(1, kind) + _field(2, shape)))


def _int(name: str, value: int) -> bytes:
    return _text(1, name) + _number(3, value) + _number(20, _ATTRIBUTE_INT)


def _ints(name: str, values: NDArray[np.int64]) -> bytes:
    return _text(1, name) + _field(8, varints(values)) + _number(20, _ATTRIBUTE_INTS)


def _strings(name: str, values: Iterable[bytes]) -> bytes:
    encoded = {each: _field(9, each) for each in (LEAF, *MODES.values())}
    return _text(1, name) + b"".join(encoded[each] for each in values) + _number(20, _ATTRIBUTE_STRINGS)


def _tensor(name: str, values: NDArray[np.float64], kind: int) -> bytes:
    content = values.tobytes() if kind == _DOUBLE else values.astype(np.float32).tobytes()
    tensor = _number(1, len(values)) + _number(2, kind) + _text(8, name) + _field(9, content)
    return _text(1, name) + _field(5, tensor) + _number(20, _ATTRIBUTE_TENSOR)


def _text(number: int, text: str) -> bytes:
    return _field(number, text.encode())


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _field(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def varints(values: NDArray[np.int64]) -> bytes:
    """Protobuf's variable-length encoding of integers from 0 to 2^35 - 1, one after the other."""
    shifts = np.arange(0, 35, 7)
    digits = (values[:, None] >> shifts) & 127
    lengths = np.maximum(1, (values[:, None] >> shifts > 0).sum(axis=1))
    places = np.arange(len(shifts))
    digits |= np.where(places < lengths[:, None] - 1, 128, 0)
    encoded: NDArray[np.uint8] = digits.astype(np.uint8)[places < lengths[:, None]]
    return encoded.tobytes()
