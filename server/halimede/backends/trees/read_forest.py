"""Read a model file with Treelite. Run only in the process that `reader` starts: damaged files can crash Treelite."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.backends.trees.forest import Forest, Nodes

CATEGORICAL = 2
FLOAT64 = 3

ZERO_IS_MISSING = 1
"""LightGBM's number of this kind of missing values, in bits 2 and 3 of a decision type."""


def read_forest(path: Path, model_type: str, *, allow_unknown_field: bool) -> Forest:
    """The forest of a file; `model_type` as in `files`. Raises whatever Treelite raises."""
    import treelite

    frontend = treelite.frontend
    xgboost: dict[str, str] = {"xgboost_json": "json", "xgboost_ubj": "ubjson"}
    if model_type in xgboost:
        model = frontend.load_xgboost_model(
            path, format_choice=xgboost[model_type], allow_unknown_field=allow_unknown_field
        )
    elif model_type == "lightgbm":
        if takes_zero_as_missing(path):
            raise ValueError("it was trained with zero_as_missing, and would be read as if it was not")
        model = frontend.load_lightgbm_model(path)
    elif model_type == "treelite_checkpoint":
        model = treelite.Model.deserialize(path)
    else:
        model = frontend.load_xgboost_model_legacy_binary(path)
    return _forest(model)


def _forest(model: Any) -> Forest:  # Any: treelite has no complete types
    header = model.get_header_accessor().get_field
    trees = [model.get_tree_accessor(tree).get_field for tree in range(model.num_tree)]
    sizes = [len(get("cleft")) for get in trees]
    leaf_shape = header("leaf_vector_shape")
    leaf_targets, leaf_classes = int(leaf_shape[0]), int(leaf_shape[1])
    class_counts = header("num_class").astype(np.int32)
    category_starts, category_stops, leaf_starts, leaf_values = [], [], [], []
    categories_before = values_before = 0
    for get, size in zip(trees, sizes, strict=True):
        category_starts.append(_padded(get("category_list_begin"), size, np.int64) + categories_before)
        category_stops.append(_padded(get("category_list_end"), size, np.int64) + categories_before)
        categories_before += len(get("category_list"))
        if leaf_targets * leaf_classes > 1:
            begin, end = (_padded(get(f"leaf_vector_{side}"), size, np.int64) for side in ("begin", "end"))
            # A leaf without a whole vector has no value.
            leaf_starts.append(np.where(end - begin == leaf_targets * leaf_classes, begin + values_before, -1))
            leaf_values.append(get("leaf_vector").astype(np.float64))
        else:
            leaf_starts.append(np.arange(size) + values_before)
            leaf_values.append(get("leaf_value").astype(np.float64))
        values_before += len(leaf_values[-1])

    def joined(name: str, dtype: Any) -> NDArray[Any]:
        return np.concatenate([get(name).astype(dtype) for get in trees])

    nodes = Nodes(
        left=joined("cleft", np.int32),
        right=joined("cright", np.int32),
        feature=joined("split_index", np.int32),
        threshold=joined("threshold", np.float64),
        comparison=joined("cmp", np.int8),
        default_left=joined("default_left", np.bool_),
        is_categorical=joined("node_type", np.int8) == CATEGORICAL,
        category_start=np.concatenate(category_starts),
        category_stop=np.concatenate(category_stops),
        category_right=joined("category_list_right_child", np.bool_),
        leaf_start=np.concatenate(leaf_starts).astype(np.int64),
        cover=_cover(trees, sizes),
    )
    return Forest(
        nodes=nodes,
        starts=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        categories=joined("category_list", np.uint32),
        leaf_values=np.concatenate(leaf_values),
        target_id=header("target_id").astype(np.int32),
        class_id=header("class_id").astype(np.int32),
        base_scores=header("base_scores").astype(np.float64),
        class_counts=class_counts,
        features=model.num_feature,
        targets=int(header("num_target")[0]),
        classes=int(class_counts.max(initial=0)),
        leaf_targets=leaf_targets,
        leaf_classes=leaf_classes,
        average=bool(header("average_tree_output")[0]),
        postprocessor=str(header("postprocessor")),
        sigmoid_alpha=float(header("sigmoid_alpha")[0]),
        ratio_c=float(header("ratio_c")[0]),
        task=int(header("task_type")[0]),
        is_double=int(header("threshold_type")[0]) == FLOAT64,
    )


def takes_zero_as_missing(path: Path) -> bool:
    """Whether a split of a LightGBM file sends zeros the way of missing values, which Treelite ignores."""
    with path.open("rb") as file:
        splits = (line.partition(b"=")[2].split() for line in file if line.startswith(b"decision_type="))
        return any(int(each) >> 2 & 3 == ZERO_IS_MISSING for line in splits for each in line)


def _padded(array: NDArray[Any], size: int, dtype: Any) -> NDArray[Any]:
    """The array, or zeros if the file has no such field."""
    return array.astype(dtype) if len(array) else np.zeros(size, dtype)


def _cover(trees: list[Callable[[str], NDArray[Any]]], sizes: list[int]) -> NDArray[np.float64]:
    """The weight of the training rows in each node, else their number; empty unless every node has it."""
    for name in ("sum_hess", "data_count"):
        found = [(get(name), get(f"{name}_present")) for get in trees]
        if all(
            len(values) == len(present) == size and present.all()
            for (values, present), size in zip(found, sizes, strict=True)
        ):
            return np.concatenate([values.astype(np.float64) for values, _ in found])
    return np.zeros(0)
