"""A forest as arrays, whatever library trained it, and the check that it is one. Pure; numpy only."""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.core.types import invalid, unsupported

LT, LE, EQ, GT, GE = range(2, 7)
"""Treelite's numbers of the comparisons that lead to the left child."""

MOST_STEPS = 4096
"""Tests on a path, where a test for several categories counts as many. ONNX Runtime reads trees recursively, and about
20,000 tests use up the stack of a thread, which ends the process."""

MOST_CATEGORY = 2**24
"""Larger categories are not exact as float32, so no value matches them."""

POSTPROCESSORS = (
    "identity",
    "identity_multiclass",
    "sigmoid",
    "multiclass_ova",
    "softmax",
    "exponential",
    "exponential_standard_ratio",
    "logarithm_one_plus_exp",
    "hinge",
    "signed_square",
)

REGRESSOR, ISOLATION_FOREST = 1, 4
"""Of Treelite's numbers of tasks, these are no classifiers and no rankers."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of all trees, one tree after the other.

    `left` and `right` are the children, counted from the first node of the tree, -1 for leaves. `feature`, `threshold`,
    `comparison` and `default_left` describe the split; NaN follows `default_left`. A node with `is_categorical` has the
    forest's `categories[category_start:category_stop]`, which lead to the left child, or to the right one with
    `category_right`. The values of a leaf begin at `leaf_start` of `leaf_values`. `cover` is the number of training
    rows, or their weight; empty if the file has none.
    """

    left: NDArray[np.int32]
    right: NDArray[np.int32]
    feature: NDArray[np.int32]
    threshold: NDArray[np.float64]
    comparison: NDArray[np.int8]
    default_left: NDArray[np.bool_]
    is_categorical: NDArray[np.bool_]
    category_start: NDArray[np.int64]
    category_stop: NDArray[np.int64]
    category_right: NDArray[np.bool_]
    leaf_start: NDArray[np.int64]
    cover: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Forest:
    """All trees. `starts` has the first node of each tree, and the number of nodes.

    A leaf has values for the outputs of its tree t: those of `target_id[t]` and `class_id[t]`, where -1 stands for all.
    The model has targets * classes outputs; `base_scores` are added to the sums, or to the averages with `average`.
    """

    nodes: Nodes
    starts: NDArray[np.int64]
    categories: NDArray[np.uint32]
    leaf_values: NDArray[np.float64]
    target_id: NDArray[np.int32]
    class_id: NDArray[np.int32]
    base_scores: NDArray[np.float64]
    class_counts: NDArray[np.int32]
    features: int
    targets: int
    classes: int
    leaf_targets: int
    leaf_classes: int
    average: bool
    postprocessor: str
    sigmoid_alpha: float
    ratio_c: float
    task: int
    is_double: bool

    @property
    def outputs(self) -> int:
        return self.targets * self.classes

    @property
    def trees(self) -> int:
        return len(self.starts) - 1

    @property
    def is_leaf(self) -> NDArray[np.bool_]:
        return self.nodes.left < 0

    def tree_of_node(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(self.trees), np.diff(self.starts))

    def output_ids(self, tree: int) -> NDArray[np.int64]:
        """The outputs that a leaf of this tree has values for, in the order of its values."""
        target, number = int(self.target_id[tree]), int(self.class_id[tree])
        targets = np.arange(self.targets) if target < 0 else np.array([target])
        classes = np.arange(self.classes) if number < 0 else np.array([number])
        return (targets[:, None] * self.classes + classes[None, :]).reshape(-1)

    def weights(self) -> NDArray[np.float64]:
        """The factor of each output's values: 1, or 1 / the number of trees that have this output."""
        if not self.average:
            return np.ones(self.outputs)
        trees = np.zeros(self.outputs)
        for tree in range(self.trees):
            trees[self.output_ids(tree)] += 1
        return 1 / np.maximum(trees, 1)


def to_arrays(forest: Forest) -> dict[str, Any]:
    values = {each.name: getattr(forest.nodes, each.name) for each in fields(Nodes)}
    values |= {each.name: getattr(forest, each.name) for each in fields(Forest) if each.name != "nodes"}
    return {name: np.asarray(value) for name, value in values.items()}


def from_arrays(arrays: dict[str, NDArray[Any]]) -> Forest:
    """The inverse of `to_arrays`. KeyError for missing arrays, ValueError for arrays of other types."""
    nodes = Nodes(**{each.name: _vector(arrays, each.name) for each in fields(Nodes)})
    values: dict[str, Any] = {}
    for each in fields(Forest):
        if each.name != "nodes":
            array = arrays[each.name]
            values[each.name] = array.item() if array.ndim == 0 else _vector(arrays, each.name)
    return Forest(nodes=nodes, **values)


def _vector(arrays: dict[str, NDArray[Any]], name: str) -> NDArray[Any]:
    array = arrays[name]
    if array.ndim != 1 or array.dtype.kind not in "iufb":
        raise ValueError(f"{name} is {array.dtype}{list(array.shape)}")
    return array


def checked(forest: Forest, model: str) -> Forest:
    """The forest without nodes that no row reaches. INVALID_ARG unless every index in it is valid, and trees are trees.

    Runtimes trust these arrays: a file that nothing checks could make them read any memory, or run for ever.
    """
    problem = _shape_problem(forest) or _node_problem(forest)
    if problem is not None:
        raise invalid(f"model '{model}': the model file is damaged: {problem}")
    return _reachable(forest, model)


def _shape_problem(forest: Forest) -> str | None:
    nodes = len(forest.nodes.left)
    if forest.trees < 1 or forest.starts[0] != 0 or forest.starts[-1] != nodes or (np.diff(forest.starts) < 1).any():
        return "it has no trees, or trees without nodes"
    lengths = {each.name: len(getattr(forest.nodes, each.name)) for each in fields(Nodes)}
    if lengths.pop("cover") not in (0, nodes) or set(lengths.values()) != {nodes}:
        return "its nodes are incomplete"
    if len(forest.target_id) != forest.trees or len(forest.class_id) != forest.trees:
        return "its trees are incomplete"
    if not (1 <= forest.features <= 2**24 and 1 <= forest.targets <= 2**20 and 1 <= forest.classes <= 2**20):
        return f"it has {forest.features} features, {forest.targets} targets and {forest.classes} classes"
    if forest.outputs > 2**20 or len(forest.base_scores) != forest.outputs:
        return f"it has {forest.outputs} outputs and {len(forest.base_scores)} base scores"
    counts = forest.class_counts
    if len(counts) != forest.targets or (counts < 1).any() or (counts > forest.classes).any():
        return "the numbers of classes of its targets are wrong"
    if (forest.target_id < -1).any() or (forest.target_id >= forest.targets).any():
        return "a tree belongs to a target that does not exist"
    if (forest.class_id < -1).any() or (forest.class_id >= forest.classes).any():
        return "a tree belongs to a class that does not exist"
    if forest.postprocessor not in POSTPROCESSORS:
        return f"its postprocessor is '{forest.postprocessor[:64]}'"
    if not (np.isfinite(forest.sigmoid_alpha) and np.isfinite(forest.ratio_c) and forest.ratio_c != 0):
        return "a parameter of its postprocessor is no number"
    return None


def _node_problem(forest: Forest) -> str | None:
    leaf = forest.is_leaf
    inner = ~leaf
    sizes = np.diff(forest.starts)[forest.tree_of_node()]
    if not ((forest.nodes.right < 0) == leaf).all():
        return "a node has one child"
    if (forest.nodes.left[inner] >= sizes[inner]).any() or (forest.nodes.right[inner] >= sizes[inner]).any():
        return "a child of a node does not exist"
    if (forest.nodes.feature[inner] < 0).any() or (forest.nodes.feature[inner] >= forest.features).any():
        return "a node splits on a feature that does not exist"
    numeric = inner & ~forest.nodes.is_categorical
    if ((forest.nodes.comparison[numeric] < LT) | (forest.nodes.comparison[numeric] > GE)).any():
        return "a node has an unknown comparison"
    if np.isnan(forest.nodes.threshold[numeric]).any():
        return "a node has no threshold"
    starts, stops = forest.nodes.category_start, forest.nodes.category_stop
    needed = np.array([len(forest.output_ids(tree)) for tree in range(forest.trees)])[forest.tree_of_node()]
    if (starts < 0).any() or (stops < starts).any() or (stops > len(forest.categories)).any():
        return "a node has categories that do not exist"
    if (stops - starts)[inner].sum() > len(forest.categories) or needed[leaf].sum() > len(forest.leaf_values):
        # What is written once and used often would take more memory than the file.
        return "nodes share their categories or values"
    if (needed != forest.leaf_targets * forest.leaf_classes).any():
        return "its leaves have values for other outputs than its trees"
    if (forest.nodes.leaf_start[leaf] < 0).any() or (forest.nodes.leaf_start + needed > len(forest.leaf_values))[
        leaf
    ].any():
        return "a leaf has no value"
    return None


def _reachable(forest: Forest, model: str) -> Forest:
    base = forest.starts[:-1][forest.tree_of_node()]
    seen = np.zeros(len(forest.nodes.left), np.bool_)
    tests = np.maximum(1, forest.nodes.category_stop - forest.nodes.category_start)
    steps = np.zeros(len(forest.nodes.left), np.int64)
    level = forest.starts[:-1]
    seen[level] = True
    while True:
        inner = level[forest.nodes.left[level] >= 0]
        own = steps[inner] + tests[inner]
        if own.max(initial=0) > MOST_STEPS:
            text = f"model '{model}': a path of a tree has more than {MOST_STEPS} tests (each category is one)"
            raise unsupported(text)
        level = np.concatenate([forest.nodes.left[inner] + base[inner], forest.nodes.right[inner] + base[inner]])
        if len(level) == 0:
            break
        if len(np.unique(level)) != len(level) or seen[level].any():
            raise invalid(f"model '{model}': the model file is damaged: a node has two parents")
        seen[level] = True
        steps[level] = np.concatenate([own, own])
    if seen.all():
        return forest
    new = np.cumsum(seen) - 1
    nodes = {each.name: getattr(forest.nodes, each.name) for each in fields(Nodes)}
    kept = {name: array[seen] if len(array) else array for name, array in nodes.items()}
    starts = np.concatenate([new[forest.starts[:-1]], [seen.sum()]])
    shift = np.repeat(starts[:-1], np.diff(starts))
    for name in ("left", "right"):
        moved = new[np.where(nodes[name] >= 0, nodes[name] + base, 0)][seen] - shift
        kept[name] = np.where(kept[name] >= 0, moved, -1).astype(np.int32)
    return replace(forest, starts=starts, nodes=Nodes(**kept))
