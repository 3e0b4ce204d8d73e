"""A forest as the bytes of an ONNX model with one TreeEnsembleRegressor, which computes the sums of all outputs. Pure.

ONNX Runtime runs forests two to four times as fast as Treelite's own interpreter. The few messages of the format are
written here, because the package `onnx` is large and its converters need the training libraries.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.backends.trees.forest import EQ, GE, GT, LE, LT, MOST_CATEGORY, Forest

INPUT, OUTPUT = "input", "sums"

MODES = {0: b"LEAF", LT: b"BRANCH_LT", LE: b"BRANCH_LEQ", EQ: b"BRANCH_EQ", GT: b"BRANCH_GT", GE: b"BRANCH_GTE"}

NO_CATEGORY = -1.0
"""What `instance` passes for values that are no category; no node tests for it."""

_NEVER = -2.0

_FLOAT, _DOUBLE = 1, 11
_ATTRIBUTE_INT, _ATTRIBUTE_TENSOR, _ATTRIBUTE_INTS, _ATTRIBUTE_STRINGS = 2, 4, 7, 8

_INTEGERS = ("treeids", "nodeids", "featureids", "truenodeids", "falsenodeids", "missing_value_tracks_true")
_NODE = np.dtype([*((name, np.int64) for name in (*_INTEGERS, "modes")), ("values", np.float64)])
"""A node, with ONNX's names of its attributes. All are 0 where a leaf has none; `modes` has keys of MODES."""


def onnx_bytes(forest: Forest) -> bytes:
    """The model: input [rows, features] and output [rows, outputs], of base scores and sums or averages.

    The input is FP64 where the file has thresholds of that type, else FP32; the output is FP32.
    """
    kind = _DOUBLE if forest.is_double else _FLOAT
    nodes = _with_category_chains(forest, _plain_nodes(forest))
    leaves = _leaf_attributes(forest)
    attributes = [
        _int("n_targets", forest.outputs),
        *(_ints(f"nodes_{name}", nodes[name]) for name in _INTEGERS),
        _modes("nodes_modes", nodes["modes"]),
        _tensor("nodes_values_as_tensor", nodes["values"], kind),
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


def _plain_nodes(forest: Forest) -> NDArray[Any]:
    """One node of ONNX for each node of the forest."""
    source, inner = forest.nodes, ~forest.is_leaf
    nodes = np.zeros(len(inner), _NODE)
    nodes["treeids"] = forest.tree_of_node()
    nodes["nodeids"] = np.arange(len(inner)) - forest.starts[nodes["treeids"]]
    nodes["featureids"] = np.where(inner, source.feature, 0)
    nodes["truenodeids"] = np.where(inner, source.left, 0)
    nodes["falsenodeids"] = np.where(inner, source.right, 0)
    nodes["missing_value_tracks_true"] = inner & source.default_left
    nodes["modes"] = np.where(inner, source.comparison, 0)
    nodes["values"] = np.where(inner & ~source.is_categorical, source.threshold, 0)
    return nodes


def _with_category_chains(forest: Forest, nodes: NDArray[Any]) -> NDArray[Any]:
    """Each test for several categories as a chain of tests for one; the true branches lead to the same child."""
    added: list[NDArray[Any]] = []
    sizes = np.diff(forest.starts)
    for at in np.flatnonzero(forest.nodes.is_categorical & ~forest.is_leaf).tolist():
        found = forest.categories[forest.nodes.category_start[at] : forest.nodes.category_stop[at]]
        found = np.unique(found[found <= MOST_CATEGORY])
        hit, miss = forest.nodes.left[at], forest.nodes.right[at]
        missing_is_hit = forest.nodes.default_left[at]
        if forest.nodes.category_right[at]:
            hit, miss, missing_is_hit = miss, hit, not missing_is_hit
        chain = np.repeat(nodes[at : at + 1], max(1, len(found)))
        tree = chain["treeids"][0]
        chain["nodeids"][1:] = np.arange(len(chain) - 1) + sizes[tree]
        sizes[tree] += len(chain) - 1
        chain["modes"] = EQ
        chain["values"] = found if len(found) else _NEVER
        chain["truenodeids"] = hit
        chain["falsenodeids"][:-1] = chain["nodeids"][1:]
        chain["falsenodeids"][-1] = miss
        chain["missing_value_tracks_true"] = missing_is_hit
        nodes[at] = chain[0]
        added.append(chain[1:])
    if not added:
        return nodes
    nodes = np.concatenate([nodes, *added])
    return nodes[np.argsort(nodes["treeids"], kind="stable")]


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


def _modes(name: str, values: NDArray[np.int64]) -> bytes:
    encoded = {number: _field(9, text) for number, text in MODES.items()}
    return _text(1, name) + b"".join(map(encoded.__getitem__, values.tolist())) + _number(20, _ATTRIBUTE_STRINGS)


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
    return varints(np.array([value]))


def varints(values: NDArray[np.int64]) -> bytes:
    """Protobuf's variable-length encoding of integers from 0 to 2^35 - 1, one after the other."""
    shifts = np.arange(0, 35, 7)
    digits = (values[:, None] >> shifts) & 127
    lengths = np.maximum(1, (values[:, None] >> shifts > 0).sum(axis=1))
    positions = np.arange(len(shifts))
    digits |= np.where(positions < lengths[:, None] - 1, 128, 0)
    encoded: NDArray[np.uint8] = digits.astype(np.uint8)[positions < lengths[:, None]]
    return encoded.tobytes()
