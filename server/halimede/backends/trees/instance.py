"""Run batches of rows on a forest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.backends.api import RunContext
from halimede.backends.trees.forest import MOST_CATEGORY, Forest
from halimede.backends.trees.onnx_file import INPUT, NO_CATEGORY, OUTPUT
from halimede.backends.trees.outputs import OutputPlan, make_output, postprocess
from halimede.backends.trees.shap import TreeShap
from halimede.core.types import unsupported

INPUT_NAME, OUTPUT_NAME, SHAP_NAME = "input__0", "output__0", "treeshap_output"
"""Triton's names of the tensors."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What the configuration asks for: the plan of the output, and the dims of both outputs."""

    plan: OutputPlan
    dims: tuple[int, ...]
    shap: TreeShap | None
    shap_dims: tuple[int, ...]


class TreeInstance:
    """A TensorInstance over a session that other instances may share."""

    def __init__(self, session: Any, forest: Forest, answers: Answers) -> None:  # Any: onnxruntime has no types
        self._session = session
        self._answers = answers
        self._dtype = np.float64 if forest.is_double else np.float32
        self._postprocess = postprocess(forest)
        self._categorical = categorical_features(forest)

    def run(
        self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str], context: RunContext
    ) -> dict[str, NDArray[Any]]:
        rows = self._prepared(inputs[INPUT_NAME])
        answers = self._answers
        results: dict[str, NDArray[Any]] = {}
        if OUTPUT_NAME in outputs:
            values = make_output(answers.plan, self._postprocess(self._sums(rows)))
            results[OUTPUT_NAME] = values.reshape(len(rows), *answers.dims)
        if SHAP_NAME in outputs and answers.shap is not None:
            shap = answers.shap.values(rows, context.is_cancelled)
            results[SHAP_NAME] = shap.reshape(len(rows), *answers.shap_dims)
        return results

    def close(self) -> None:
        self._session = None

    def _prepared(self, rows: NDArray[Any]) -> NDArray[Any]:
        if self._categorical.size:
            return with_categories(rows, self._categorical)
        # The array is a view at any offset of a message.
        return rows if rows.flags.aligned else rows.copy()

    def _sums(self, rows: NDArray[Any]) -> NDArray[np.float32]:
        sums: NDArray[np.float32] = self._session.run([OUTPUT], {INPUT: rows.astype(self._dtype, copy=False)})[0]
        return sums


def categorical_features(forest: Forest) -> NDArray[np.int32]:
    return np.unique(forest.nodes.feature[forest.nodes.is_categorical & ~forest.is_leaf])


def with_categories(rows: NDArray[Any], columns: NDArray[np.int32]) -> NDArray[Any]:
    """A copy in which the values of categorical features are whole numbers, as the libraries read them.

    Fractions are cut off; negative and very large numbers are no category. NaN stays.
    """
    rows = rows.copy()
    values = rows[:, columns]
    is_none = (values < 0) | (values > MOST_CATEGORY)
    rows[:, columns] = np.where(is_none, NO_CATEGORY, np.trunc(values))
    return rows


def check_categorical(forest: Forest, model: str) -> None:
    """UNSUPPORTED if a feature is categorical in one node and numeric in another one."""
    numeric = np.unique(forest.nodes.feature[~forest.nodes.is_categorical & ~forest.is_leaf])
    both = np.intersect1d(categorical_features(forest), numeric)
    if both.size:
        raise unsupported(f"model '{model}': feature {both[0]} is categorical in some trees and numeric in others")
