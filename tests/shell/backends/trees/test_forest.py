from dataclasses import fields, replace

import numpy as np
import pytest

from halimede.backends.trees.forest import MOST_STEPS, Forest, Nodes, checked, from_arrays, to_arrays
from halimede.backends.trees.onnx_file import varints
from halimede.backends.trees.shap import TreeShap
from halimede.core.types import ErrorCode, InferenceError
from support.refusals import error_of
from support.tree_models import config, run


def forest(left=(1, -1, -1), right=(2, -1, -1), feature=(0, 0, 0), values=(0, 1, 2), **other) -> Forest:
    """One tree that compares with 0."""
    nodes = len(left)
    zeros = np.zeros(nodes, np.int64)
    parts = Nodes(
        left=np.array(left, np.int32),
        right=np.array(right, np.int32),
        feature=np.array(feature, np.int32),
        threshold=np.zeros(nodes),
        comparison=np.full(nodes, 2, np.int8),
        default_left=np.zeros(nodes, np.bool_),
        is_categorical=np.zeros(nodes, np.bool_),
        category_start=zeros,
        category_stop=zeros,
        category_right=np.zeros(nodes, np.bool_),
        leaf_start=np.arange(nodes),
        cover=np.zeros(0),
    )
    changed = {each.name: other.pop(each.name) for each in fields(Nodes) if each.name in other}
    made = Forest(
        nodes=replace(parts, **changed),
        starts=np.array([0, nodes]),
        categories=np.zeros(0, np.uint32),
        leaf_values=np.array(values, np.float64),
        target_id=np.zeros(1, np.int32),
        class_id=np.zeros(1, np.int32),
        base_scores=np.zeros(1),
        class_counts=np.ones(1, np.int32),
        features=1,
        targets=1,
        classes=1,
        leaf_targets=1,
        leaf_classes=1,
        average=False,
        postprocessor="identity",
        sigmoid_alpha=1.0,
        ratio_c=1.0,
        task=1,
        is_double=False,
    )
    return replace(made, **other)


def test_a_forest_of_arrays_is_the_same_forest():
    arrays = to_arrays(forest())
    again = to_arrays(from_arrays(arrays))
    assert {name: array.tolist() for name, array in again.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }
    with pytest.raises(ValueError, match="left is"):
        from_arrays(arrays | {"left": np.array(["a"])})


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ({"left": np.array([3, -1, -1])}, "a child of a node does not exist"),
        ({"left": np.array([1, 1, -1])}, "a node has one child"),
        ({"left": np.array([0, -1, -1])}, "a node has two parents"),
        ({"left": np.array([2, -1, -1])}, "a node has two parents"),
        ({"left": np.array([1, 2, -1]), "right": np.array([2, 2, -1])}, "a node has two parents"),
        ({"feature": np.array([1, 0, 0])}, "a feature that does not exist"),
        ({"feature": np.array([-1, 0, 0])}, "a feature that does not exist"),
        ({"comparison": np.array([0, 0, 0])}, "an unknown comparison"),
        ({"threshold": np.array([np.nan, 0, 0])}, "no threshold"),
        ({"leaf_start": np.array([0, 1, 3])}, "a leaf has no value"),
        ({"leaf_start": np.array([0, 1, -1])}, "a leaf has no value"),
        ({"category_stop": np.array([1, 0, 0])}, "categories that do not exist"),
        ({"category_start": np.array([-1, 0, 0])}, "categories that do not exist"),
        (
            {"categories": np.zeros(1), "left": [1, 3, -1, -1, -1]}
            | {"right": [2, 4, -1, -1, -1], "feature": [0] * 5, "category_stop": np.ones(5, int), "values": [0] * 5},
            "share their categories",
        ),
        ({"leaf_start": np.zeros(3, int), "leaf_values": np.zeros(1)}, "share their categories or values"),
        ({"class_id": np.array([1])}, "a class that does not exist"),
        ({"target_id": np.array([-2])}, "a target that does not exist"),
        ({"base_scores": np.zeros(2)}, "1 outputs and 2 base scores"),
        ({"class_counts": np.array([2])}, "numbers of classes"),
        ({"leaf_classes": 2}, "values for other outputs"),
        ({"features": 0}, "0 features"),
        ({"classes": 2**20 + 1}, "classes"),
        ({"starts": np.array([0, 2])}, "trees without nodes"),
        ({"starts": np.array([0])}, "trees without nodes"),
        ({"right": np.array([2, -1])}, "nodes are incomplete"),
        ({"cover": np.ones(2)}, "nodes are incomplete"),
        ({"class_id": np.zeros(2)}, "trees are incomplete"),
        ({"postprocessor": "system"}, "its postprocessor is 'system'"),
        ({"ratio_c": 0.0}, "no number"),
    ],
    ids=str,
)
def test_a_damaged_forest_is_refused(damage, text):
    error = error_of(checked, forest(**damage), "m")
    assert error.code is ErrorCode.INVALID_ARG
    assert text in error.message


def chain(depth: int) -> Forest:
    """A tree of that many splits, each with a leaf to its left."""
    inner = np.arange(depth)
    left = np.concatenate([2 * inner + 1, [-1]])
    order = np.full(2 * depth + 1, -1)
    right = order.copy()
    order[2 * inner], right[2 * inner] = left[:-1], 2 * inner + 2
    return forest(left=order, right=right, feature=np.zeros(len(order)), values=np.arange(len(order)))


def test_paths_are_as_long_as_can_be_read_and_no_longer():
    deepest = checked(chain(MOST_STEPS), "m")
    assert run(deepest, config([1], features=1), np.ones((1, 1), np.float32)).tolist() == [[2 * MOST_STEPS]]
    assert categories(range(MOST_STEPS)).trees == 1
    for refused in (lambda: checked(chain(MOST_STEPS + 1), "m"), lambda: categories(range(MOST_STEPS + 1))):
        with pytest.raises(InferenceError, match="more than 4096 tests") as caught:
            refused()
        assert caught.value.code is ErrorCode.UNSUPPORTED


def test_nodes_that_no_row_reaches_are_left_out():
    # Nodes 1 and 2 refer to each other; the root's children are 3 and 4.
    loose = forest(
        left=(3, 2, 1, -1, -1), right=(4, 2, 1, -1, -1), feature=[0] * 5, values=(0, 0, 0, 5, 7), cover=np.ones(5)
    )
    kept = checked(loose, "m")
    assert (kept.nodes.left.tolist(), kept.nodes.right.tolist(), kept.starts.tolist()) == (
        [1, -1, -1],
        [2, -1, -1],
        [0, 3],
    )
    x = np.array([[-1], [1]], np.float32)
    assert run(kept, config([1], features=1), x).tolist() == [[5], [7]]


def categories(found, right=False, default_left=False) -> Forest:
    return checked(
        forest(
            is_categorical=np.array([True, False, False]),
            categories=np.array(found, np.uint32),
            category_stop=np.array([len(found), 0, 0]),
            category_right=np.array([right, False, False]),
            default_left=np.array([default_left, False, False]),
            cover=np.array([4.0, 1, 3]),
        ),
        "m",
    )


@pytest.mark.parametrize("default_left", [False, True])
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize(
    "found",
    [[], [0], [1, 5], [0, 1, 2, 3, 63, 64, 2000], list(range(1500)), [2**32 - 1, 3], [2**24 + 1, 3, 4]],
    ids=len,
)
def test_categories_lead_to_their_side(found, right, default_left):
    made = categories(found, right, default_left)
    values = [0, 1, 1.9, 2, 3, 5, 64, 2000, 2**24, 1e9, -0.5, -1, -2, np.inf, -np.inf]
    x = np.array([[each] for each in [*values, np.nan]], np.float32)
    matches = [each >= 0 and each <= 2**24 and int(each) in found for each in values]
    goes_left = [*(each != right for each in matches), default_left]
    expected = [[1.0] if each else [2.0] for each in goes_left]
    assert run(made, config([1], features=1), x).tolist() == expected
    shap = TreeShap(made, "m").values(x, lambda: False)
    assert np.abs(shap.sum(axis=-1) - expected).max() < 1e-6


def test_a_tree_has_any_number_of_tests_for_several_categories():
    made = forest(
        left=(1, -1, 3, -1, -1),
        right=(2, -1, 4, -1, -1),
        feature=[0] * 5,
        values=(0, 10, 0, 20, 30),
        is_categorical=np.array([True, False, True, False, False]),
        categories=np.array([1, 2, 3, 4, 5, 6], np.uint32),
        category_start=np.array([0, 0, 3, 0, 0]),
        category_stop=np.array([3, 0, 6, 0, 0]),
    )
    x = np.arange(8, dtype=np.float32)[:, None]
    expected = [[each] for each in (30, 10, 10, 10, 20, 20, 20, 30)]
    assert run(checked(made, "m"), config([1], features=1), x).tolist() == expected


def test_a_feature_is_categorical_or_numeric():
    made = forest(
        left=(1, 3, -1, -1, -1),
        right=(2, 4, -1, -1, -1),
        feature=[0] * 5,
        values=[0] * 5,
        is_categorical=np.array([True, False, False, False, False]),
    )
    with pytest.raises(InferenceError, match="feature 0 is categorical in some trees"):
        run(checked(made, "m"), config([1], features=1), np.zeros((1, 1), np.float32))


@pytest.mark.parametrize("comparison", [2, 3, 4, 5, 6])
def test_every_comparison_is_the_one_of_its_number(comparison):
    made = checked(forest(comparison=np.full(3, comparison, np.int8), default_left=np.ones(3, np.bool_)), "m")
    x = np.array([[-1], [0], [1], [np.nan]], np.float32)
    goes_left = {2: [1, 0, 0, 1], 3: [1, 1, 0, 1], 4: [0, 1, 0, 1], 5: [0, 0, 1, 1], 6: [0, 1, 1, 1]}[comparison]
    assert run(made, config([1], features=1), x).ravel().tolist() == [1 if each else 2 for each in goes_left]


def test_thresholds_of_double_precision_are_exact():
    just_above = np.nextafter(np.float64(np.float32(0.1)), 1)
    made = checked(forest(threshold=np.full(3, just_above), is_double=True), "m")
    x = np.array([[np.float32(0.1)], [np.nextafter(np.float32(0.1), np.float32(1))]], np.float32)
    assert run(made, config([1], features=1), x).tolist() == [[1], [2]]


def test_varints_are_those_of_protobuf():
    assert varints(np.array([0, 1, 127, 128, 300, 2**31 - 1, 2**32])) == bytes.fromhex(
        "00 01 7f 8001 ac02 ffffffff07 8080808010"
    )
