"""Complete a configuration from a forest, and check that both agree. Pure."""

from dataclasses import dataclass, replace
from math import prod

from halimede.backends.trees.forest import Forest
from halimede.backends.trees.instance import INPUT_NAME, OUTPUT_NAME, SHAP_NAME
from halimede.backends.trees.options import TreeOptions
from halimede.backends.trees.outputs import OutputPlan, output_plans
from halimede.core.config.autocomplete import ModelSignature, TensorSignature, check_signature, complete
from halimede.core.config.model_config import ModelConfig, ModelOutput, inner_dims
from halimede.core.types import DataType, invalid

DEFAULT_MAX_BATCH_SIZE = 1024
"""Larger than other backends' default, because a row takes microseconds."""


@dataclass(frozen=True, slots=True)
class TreeSignature:
    """The tensors of a model with one configuration; `plan` is how its output is made, `shap_dims` () without SHAP."""

    tensors: ModelSignature
    plan: OutputPlan
    dims: tuple[int, ...]
    shap_dims: tuple[int, ...]


def tree_signature(config: ModelConfig, forest: Forest, options: TreeOptions) -> TreeSignature:
    """The signature that fits the dims in the configuration, if one does, else the preferred one."""
    outputs = {each.name: each for each in config.output}
    plans = output_plans(forest, options)
    plan = plans[0]
    dims: tuple[int, ...] = (plan.columns,)
    given = _inner_dims(config, outputs.get(OUTPUT_NAME))
    for each in plans:
        if given is not None and prod(given) == each.columns and min(given, default=1) > 0:
            plan, dims = each, given
    columns = forest.features + 1
    shap_dims: tuple[int, ...] = ()
    tensors = [TensorSignature(OUTPUT_NAME, DataType.FP32, (-1, *dims))]
    if SHAP_NAME in outputs:
        shap_dims = (columns,) if forest.outputs == 1 else (forest.outputs, columns)
        given = _inner_dims(config, outputs[SHAP_NAME])
        if given is not None and prod(given) == forest.outputs * columns and min(given, default=1) > 0:
            shap_dims = given
        tensors.append(TensorSignature(SHAP_NAME, DataType.FP32, (-1, *shap_dims)))
    inputs = (TensorSignature(INPUT_NAME, DataType.FP32, (-1, forest.features)),)
    return TreeSignature(ModelSignature(inputs, tuple(tensors)), plan, dims, shap_dims)


def completed_config(
    config: ModelConfig, forest: Forest, options: TreeOptions, default_max_batch_size: int
) -> tuple[ModelConfig, tuple[str, ...]]:
    """The completed configuration and notes for the log."""
    signature = tree_signature(config, forest, options)
    return complete(config, signature.tensors, default_max_batch_size=default_max_batch_size)


def checked_signature(config: ModelConfig, forest: Forest, options: TreeOptions, model: str) -> TreeSignature:
    """The signature; INVALID_ARG with every disagreement between configuration and file."""
    signature = tree_signature(config, forest, options)
    problems = [each.message for each in check_signature(replace(config, name=model), signature.tensors)]
    if any(each.name == OUTPUT_NAME for each in config.output) and problems:
        problems.append(_describe(forest, options))
    if problems:
        raise invalid("; ".join(problems))
    return signature


def _describe(forest: Forest, options: TreeOptions) -> str:
    """What the file has, for the text of an error."""
    plans = output_plans(forest, options)
    widths = " or ".join(str(each.columns) for each in plans)
    what = "the number of the class" if options.gives_class else "values"
    return f"the file has {forest.features} features, and {OUTPUT_NAME} has {what} of dims [ {widths} ]"


def _inner_dims(config: ModelConfig, output: ModelOutput | None) -> tuple[int, ...] | None:
    """The dims of an output without rows; None if the configuration leaves them open."""
    if output is None or (not output.dims and output.reshape is None):
        return None
    dims = inner_dims(output)
    return dims if config.max_batch_size > 0 else dims[1:]
