"""A forest as arrays, whatever library trained it, and the check that it is one. Pure; numpy only."""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.core.types import ErrorCode, InferenceError

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
class Forest:
    """All trees, with their nodes one after the other. `starts` has the first node of each tree, and the end.

    Arrays per node: `left` and `right` are the children, counted from the first node of the tree, -1 for leaves.
    `feature`, `threshold`, `comparison` and `default_left` describe the split; NaN follows `default_left`. A node with
    `is_categorical` has `categories[category_start:category_stop]`, which lead to the left child, or to the right one
    with `category_right`. `cover` is the number of training rows, or their weight; empty if the file has none.

    The value of a leaf is `leaf_values[leaf_start:leaf_start + outputs of the tree]`. Tree t adds it to the outputs of
    `target_id[t]` and `class_id[t]`; -1 stands for all. The model has targets * classes outputs; `base_scores` are
    added to the sums, or to the averages with `average`.
    """

    starts: NDArray[np.int64]
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
    categories: NDArray[np.uint32]
    cover: NDArray[np.float64]
    leaf_start: NDArray[np.int64]
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
        return self.left < 0

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


NODE_ARRAYS = (
    "left",
    "right",
    "feature",
    "threshold",
    "comparison",
    "default_left",
    "is_categorical",
    "category_start",
    "category_stop",
    "category_right",
    "leaf_start",
)


def to_arrays(forest: Forest) -> dict[str, Any]:
    return {each.name: np.asarray(getattr(forest, each.name)) for each in fields(Forest)}


def from_arrays(arrays: dict[str, NDArray[Any]]) -> Forest:
    """The inverse of `to_arrays`. ValueError for values of other types."""
    values: dict[str, Any] = {}
    for each in fields(Forest):
        array = arrays[each.name]
        if array.ndim == 0:
            values[each.name] = array.item()
        elif array.ndim == 1 and array.dtype.kind in "iufb":
            values[each.name] = array
        else:
            raise ValueError(f"{each.name} is {array.dtype}{list(array.shape)}")
    return Forest(**values)


def checked(forest: Forest, model: str) -> Forest:
    """The forest without nodes that no row reaches. INVALID_ARG unless every index in it is valid, and trees are trees.

    Runtimes trust these arrays: a file that nothing checks could make them read any memory, or run for ever.
    """
    problem = _shape_problem(forest) or _node_problem(forest)
    if problem is not None:
        raise InferenceError(ErrorCode.INVALID_ARG, f"model '{model}': the model file is damaged: {problem}")
    return _reachable(forest, model)


def _shape_problem(forest: Forest) -> str | None:
    nodes = len(forest.left)
    if forest.trees < 1 or forest.starts[0] != 0 or forest.starts[-1] != nodes or (np.diff(forest.starts) < 1).any():
        return "it has no trees, or trees without nodes"
    if any(len(getattr(forest, name)) != nodes for name in NODE_ARRAYS) or len(forest.cover) not in (0, nodes):
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
    if not ((forest.right < 0) == leaf).all():
        return "a node has one child"
    if (forest.left[inner] >= sizes[inner]).any() or (forest.right[inner] >= sizes[inner]).any():
        return "a child of a node does not exist"
    if (forest.feature[inner] < 0).any() or (forest.feature[inner] >= forest.features).any():
        return "a node splits on a feature that does not exist"
    numeric = inner & ~forest.is_categorical
    if ((forest.comparison[numeric] < LT) | (forest.comparison[numeric] > GE)).any():
        return "a node has an unknown comparison"
    if np.isnan(forest.threshold[numeric]).any():
        return "a node has no threshold"
    starts, stops = forest.category_start, forest.category_stop
    if (starts < 0).any() or (stops < starts).any() or (stops > len(forest.categories)).any():
        return "a node has categories that do not exist"
    needed = np.array([len(forest.output_ids(tree)) for tree in range(forest.trees)])[forest.tree_of_node()]
    if (needed != forest.leaf_targets * forest.leaf_classes).any():
        return "its leaves have values for other outputs than its trees"
    if (forest.leaf_start[leaf] < 0).any() or (forest.leaf_start + needed > len(forest.leaf_values))[leaf].any():
        return "a leaf has no value"
    return None


def _reachable(forest: Forest, model: str) -> Forest:
    base = forest.starts[:-1][forest.tree_of_node()]
    seen = np.zeros(len(forest.left), np.bool_)
    tests = np.maximum(1, forest.category_stop - forest.category_start)
    steps = np.zeros(len(forest.left), np.int64)
    level = forest.starts[:-1]
    seen[level] = True
    while True:
        inner = level[forest.left[level] >= 0]
        own = steps[inner] + tests[inner]
        if own.max(initial=0) > MOST_STEPS:
            text = f"model '{model}': a path of a tree has more than {MOST_STEPS} tests (each category is one)"
            raise InferenceError(ErrorCode.UNSUPPORTED, text)
        level = np.concatenate([forest.left[inner] + base[inner], forest.right[inner] + base[inner]])
        if len(level) == 0:
            break
        if len(np.unique(level)) != len(level) or seen[level].any():
            text = f"model '{model}': the model file is damaged: a node has two parents"
            raise InferenceError(ErrorCode.INVALID_ARG, text)
        seen[level] = True
        steps[level] = np.concatenate([own, own])
    if seen.all():
        return forest
    new = np.cumsum(seen) - 1
    kept = {name: getattr(forest, name)[seen] for name in (*NODE_ARRAYS, *(("cover",) if len(forest.cover) else ()))}
    starts = np.concatenate([new[forest.starts[:-1]], [seen.sum()]])
    shift = np.repeat(starts[:-1], np.diff(starts))
    for name in ("left", "right"):
        child = getattr(forest, name)
        moved = new[np.where(child >= 0, child + base, 0)][seen] - shift
        kept[name] = np.where(kept[name] >= 0, moved, -1).astype(np.int32)
    return replace(forest, starts=starts, **kept)
