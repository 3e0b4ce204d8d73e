"""SHAP values of forests (TreeSHAP by tree paths), for any library's model. Pure; numpy only.

A leaf contributes its value if a row follows the leaf's path. For the feature i of the path, let o_i be 1 if the row
follows all splits on i, else 0, and z_i the share of the training rows that do. The Shapley value of i is

    value * (o_i - z_i) * integral over t from 0 to 1 of the product over the path's other features j of
                          (t * o_j + (1 - t) * z_j)

The integrand is a polynomial, so a Gauss-Legendre sum with half as many points as features is exact.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.backends.trees.forest import EQ, GE, GT, LE, LT, MOST_CATEGORY, Forest
from halimede.core.types import invalid, unsupported

MOST_ELEMENTS = 1 << 17
"""Bounds the temporary arrays: elements of one chunk of rows and path features. A megabyte stays in a core's cache."""

MOST_VALUES = 1 << 28
"""A gigabyte of them; what a request asks for is many times as large as the request."""

MOST_CONDITIONS = 10_000_000
"""Splits on the paths to all leaves; they take about a gigabyte and a minute to prepare."""

_TINY = 1e-30
"""In place of a share of 0, which would be a division by 0."""

_COMPARE: dict[int, Callable[[Any, Any], Any]] = {
    LT: np.less,
    LE: np.less_equal,
    EQ: np.equal,
    GT: np.greater,
    GE: np.greater_equal,
}


@dataclass(frozen=True, slots=True)
class _Paths:
    """Some trees of a forest. Elements are pairs of a leaf and a feature of its path, ordered by leaf.

    A condition is a split on a path: node, and whether the path goes left. Conditions are ordered by element.
    """

    nodes: NDArray[np.int64]
    condition_node: NDArray[np.int64]
    condition_left: NDArray[np.bool_]
    element_start: NDArray[np.int64]
    element_share: NDArray[np.float64]
    element_leaf: NDArray[np.int64]
    leaf_start: NDArray[np.int64]
    by_feature: NDArray[np.int64]
    feature_start: NDArray[np.int64]
    feature: NDArray[np.int64]
    values: NDArray[np.float64]
    points: NDArray[np.float64]
    point_weights: NDArray[np.float64]


class TreeShap:
    """The SHAP values of one forest; safe to use from several threads."""

    def __init__(self, forest: Forest, model: str) -> None:
        """UNSUPPORTED if the forest has several targets, or its file no statistics of its nodes."""
        if forest.targets > 1:
            text = f"model '{model}': treeshap_output needs a model with one target, the file has {forest.targets}"
            raise unsupported(text)
        if len(forest.nodes.cover) == 0:
            raise unsupported(
                f"model '{model}': treeshap_output needs the number of training rows of each node, which the file lacks"
            )
        self._forest = forest
        factors = forest.weights()
        self._expected = forest.base_scores.copy()
        self._groups: list[_Paths] = []
        group: list[tuple[int, list[_Leaf]]] = []
        size = total = 0
        for tree in range(forest.trees):
            leaves = _leaves(forest, tree, MOST_CONDITIONS - total)
            if leaves is None:
                raise unsupported(
                    f"model '{model}': treeshap_output needs trees with at most {MOST_CONDITIONS} splits on their paths"
                )
            values = _leaf_outputs(forest, tree, leaves, factors)
            self._expected += np.array([leaf.share for leaf in leaves]) @ values
            group.append((tree, leaves))
            conditions = sum(len(leaf.conditions) for leaf in leaves)
            size, total = size + conditions, total + conditions
            if size > MOST_ELEMENTS // 4:
                self._groups += _paths(forest, group, factors)
                group, size = [], 0
        self._groups += _paths(forest, group, factors)

    def values(self, rows: NDArray[np.float32], is_cancelled: Callable[[], bool]) -> NDArray[np.float32]:
        """SHAP values [rows, outputs, features + 1] of rows [rows, features]; the last column has the expected value.

        They add up to the sums before postprocessing. Ends early, with wrong values, once `is_cancelled`. INVALID_ARG
        for more values than an answer can have.
        """
        forest = self._forest
        row_size = forest.outputs * (forest.features + 1)
        if len(rows) * row_size > MOST_VALUES:
            text = f"treeshap_output of {len(rows)} rows would have more than {MOST_VALUES} values; send fewer rows"
            raise invalid(text)
        result = np.zeros((len(rows), forest.outputs, forest.features + 1), np.float32)
        step = max(1, MOST_ELEMENTS // max(row_size, *(len(paths.element_share) for paths in self._groups), 1))
        for start in range(0, len(rows), step):
            if is_cancelled():
                break
            part = slice(start, start + step)
            sums = np.zeros(result[part].shape)
            sums[:, :, -1] = self._expected
            for paths in self._groups:
                self._add(paths, rows[part], sums)
            result[part] = sums
        return result

    def _add(self, paths: _Paths, rows: NDArray[np.float32], result: NDArray[np.float64]) -> None:
        goes_left = decisions(self._forest, paths.nodes, rows)
        follows = np.logical_and.reduceat(
            goes_left[:, paths.condition_node] == paths.condition_left, paths.element_start, axis=1
        )
        share = paths.element_share
        total = np.zeros(follows.shape)
        for point, weight in zip(paths.points, paths.point_weights, strict=True):
            terms = np.where(follows, point + (1 - point) * share, (1 - point) * share)
            products = np.multiply.reduceat(terms, paths.leaf_start, axis=1)
            total += weight * products[:, paths.element_leaf] / terms
        total *= follows - share
        for output in range(result.shape[1]):
            values = total * paths.values[paths.element_leaf, output]
            result[:, output, paths.feature] += np.add.reduceat(
                values[:, paths.by_feature], paths.feature_start, axis=1
            )


def decisions(forest: Forest, nodes: NDArray[np.int64], rows: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Whether each row goes left at each of `nodes`: [rows, nodes]."""
    values = rows[:, forest.nodes.feature[nodes]]
    threshold, comparison = forest.nodes.threshold[nodes], forest.nodes.comparison[nodes]
    left = np.zeros(values.shape, np.bool_)
    numeric = ~forest.nodes.is_categorical[nodes]
    for number, compare in _COMPARE.items():
        chosen = numeric & (comparison == number)
        if chosen.any():
            left[:, chosen] = compare(values[:, chosen].astype(np.float64), threshold[chosen])
    for at in np.flatnonzero(~numeric):
        node = nodes[at]
        column = values[:, at]
        found = forest.categories[forest.nodes.category_start[node] : forest.nodes.category_stop[node]]
        is_category = (column >= 0) & (column <= MOST_CATEGORY)
        matches = is_category & np.isin(np.where(is_category, column, 0).astype(np.int64), found)
        left[:, at] = matches != forest.nodes.category_right[node]
    return np.where(np.isnan(values), forest.nodes.default_left[nodes], left)


@dataclass(slots=True)
class _Leaf:
    """A leaf, its share of the training rows, and its path: node, whether left, share of the node's rows."""

    node: int
    share: float
    conditions: list[tuple[int, bool, float]]


def _leaves(forest: Forest, tree: int, most: int) -> list[_Leaf] | None:
    """The leaves, with nodes counted over all trees; None if their paths have more than `most` conditions."""
    base = int(forest.starts[tree])
    cover = forest.nodes.cover
    found: list[_Leaf] = []
    open_nodes: list[_Leaf] = [_Leaf(base, 1.0, [])]
    while open_nodes:
        here = open_nodes.pop()
        if forest.nodes.left[here.node] < 0:
            found.append(here)
            most -= len(here.conditions)
            if most < 0:
                return None
            continue
        children = (base + int(forest.nodes.left[here.node]), True), (base + int(forest.nodes.right[here.node]), False)
        total = float(cover[here.node])
        for child, is_left in children:
            share = float(cover[child]) / total if total > 0 else 0.0
            condition = (here.node, is_left, share)
            open_nodes.append(_Leaf(child, here.share * share, [*here.conditions, condition]))
    return found


def _leaf_outputs(forest: Forest, tree: int, leaves: list[_Leaf], factors: NDArray[np.float64]) -> NDArray[np.float64]:
    """What each leaf adds to each output: [leaves, outputs]."""
    ids = forest.output_ids(tree)
    starts = forest.nodes.leaf_start[[leaf.node for leaf in leaves]]
    values = np.zeros((len(leaves), forest.outputs))
    values[:, ids] = forest.leaf_values[starts[:, None] + np.arange(len(ids))] * factors[ids]
    return values


def _paths(forest: Forest, group: list[tuple[int, list[_Leaf]]], factors: NDArray[np.float64]) -> list[_Paths]:
    """The paths of a group of trees; none if no tree of it has a split."""
    conditions: list[tuple[int, bool]] = []
    element_start: list[int] = []
    share: list[float] = []
    element_leaf: list[int] = []
    feature: list[int] = []
    leaf_start: list[int] = []
    values = []
    for tree, leaves in group:
        with_paths = [leaf for leaf in leaves if leaf.conditions]
        if not with_paths:
            continue
        values.append(_leaf_outputs(forest, tree, with_paths, factors))
        for leaf in with_paths:
            number = len(leaf_start)
            leaf_start.append(len(share))
            by_feature: dict[int, list[tuple[int, bool, float]]] = {}
            for condition in leaf.conditions:
                by_feature.setdefault(int(forest.nodes.feature[condition[0]]), []).append(condition)
            for each, splits in by_feature.items():
                element_start.append(len(conditions))
                conditions += [(node, is_left) for node, is_left, _ in splits]
                share.append(max(_TINY, float(np.prod([part for _, _, part in splits]))))
                element_leaf.append(number)
                feature.append(each)
    if not share:
        return []
    nodes, at = np.unique([node for node, _ in conditions], return_inverse=True)
    features = np.array(feature)
    order = np.argsort(features, kind="stable")
    used, feature_start = np.unique(features[order], return_index=True)
    longest = int(np.diff([*leaf_start, len(share)]).max())
    points, weights = np.polynomial.legendre.leggauss((longest + 1) // 2)
    return [
        _Paths(
            nodes=nodes,
            condition_node=at,
            condition_left=np.array([is_left for _, is_left in conditions]),
            element_start=np.array(element_start),
            element_share=np.array(share),
            element_leaf=np.array(element_leaf),
            leaf_start=np.array(leaf_start),
            by_feature=order,
            feature_start=feature_start,
            feature=used,
            values=np.concatenate(values),
            points=(points + 1) / 2,
            point_weights=weights / 2,
        )
    ]
