"""The configuration of scikit-learn models: which method makes an output, and how arrays become tensors. Pure."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.core.config.model_config import ModelConfig
from halimede.core.types import DataType
from halimede.core.types.error import clip, internal, invalid

METHODS = ("predict", "predict_proba", "predict_log_proba", "decision_function", "score_samples", "transform", "apply")

METHOD_OF = "method_of_"
"""The parameter `method_of_<output>` names the method that makes an output."""

_BY_NAME = {"probabilities": "predict_proba", **{method: method for method in METHODS}}

LABEL, PROBABILITIES, PREDICTION, INPUT = "label", "probabilities", "prediction", "input"
"""Names of tensors in a configuration that is completed from the file."""


def output_methods(config: ModelConfig, model: str) -> Mapping[str, str]:
    """The method by output. INVALID_ARG for other methods, and for parameters of outputs that do not exist."""
    names = [each.name for each in config.output]
    problems: list[str] = []
    methods: dict[str, str] = {name: _BY_NAME.get(name, "predict") for name in names}
    for key, value in config.parameters.items():
        if not key.startswith(METHOD_OF):
            continue
        name, method = key.removeprefix(METHOD_OF), value.string_value
        if name not in methods:
            problems.append(f"parameter '{clip(key)}': there is no output '{clip(name)}'")
        elif method not in METHODS:
            problems.append(f"parameter '{clip(key)}' is '{clip(method)}'; it must be one of {', '.join(METHODS)}")
        else:
            methods[name] = method
    if problems:
        raise invalid(f"model '{model}': {'; '.join(problems)}")
    return methods


def limited_jobs(n_jobs: int | None, share: int, *, none_is_one: bool) -> int | None:
    """The `n_jobs` of an estimator that may use `share` cores.

    In scikit-learn None means one, and it stays: with two jobs a forest of 50 trees takes four times as long for a
    batch, because each batch starts threads. In XGBoost and LightGBM None means all cores, as negative numbers do
    everywhere.
    """
    if n_jobs is None:
        return None if none_is_one else share
    return share if n_jobs < 0 else min(n_jobs, share)


def estimator_input(arrays: Mapping[str, NDArray[Any]], config: ModelConfig) -> NDArray[Any]:
    """The inputs as one array: a single one as it is, several side by side in the configuration's order.

    Strings are `str`. INVALID_ARG if a string is not UTF-8.
    """
    columns = [_decoded(each.name, arrays[each.name]) for each in config.input if each.name in arrays]
    if len(columns) == 1:
        return columns[0]
    kind = object if any(column.dtype == object for column in columns) else None
    return np.concatenate([column.reshape(len(column), -1).astype(kind or column.dtype) for column in columns], axis=1)


def tensor_output(name: str, result: Any, config: ModelConfig, rows: int) -> NDArray[Any]:
    """A method's result as the output's array. INTERNAL if its datatype or size does not fit the configuration."""
    output = next(each for each in config.output if each.name == name)
    if isinstance(result, list):
        text = f"output '{name}': the estimator answers with {len(result)} arrays, one per target; a tensor has one"
        raise internal(text)
    array = result.toarray() if hasattr(result, "toarray") else np.asarray(result)
    dims = output.dims if output.reshape is None else output.reshape.shape
    shape = (rows, *dims) if config.max_batch_size > 0 else dims
    if array.size != _size(shape, array.size):
        raise internal(
            f"output '{name}': the estimator answers with shape {list(array.shape)}, which is not of dims {list(dims)}"
        )
    array = array.reshape(shape)
    if output.data_type is DataType.BYTES:
        return array.astype(object) if array.dtype.kind == "O" else array.astype(str).astype(object)
    dtype = output.data_type.dtype
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and dtype.kind != "f"):
        text = f"output '{name}': the estimator answers with {array.dtype}, which is not {output.data_type.config_name}"
        raise internal(text)
    return np.ascontiguousarray(array, dtype)


def _size(shape: tuple[int, ...], size: int) -> int:
    """The number of elements of a shape with at most one open dimension, which takes what is left of `size`."""
    fixed = 1
    for each in shape:
        fixed *= each if each >= 0 else 1
    if any(each < 0 for each in shape):
        return size if fixed and size % fixed == 0 and sum(each < 0 for each in shape) == 1 else -1
    return fixed


def _decoded(name: str, array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype != object:
        return array
    texts = np.empty(array.shape, dtype=object)
    try:
        texts.reshape(-1)[:] = [element.decode() for element in array.reshape(-1).tolist()]
    except UnicodeDecodeError as error:
        text = f"input '{name}': an element is not UTF-8 text ({error.reason} at its byte {error.start})"
        raise invalid(text) from error
    return texts
