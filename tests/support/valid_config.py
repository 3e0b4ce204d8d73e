"""A valid configuration, and the problems of changes to it."""

from dataclasses import replace

from halimede.core.config.model_config import (
    ModelConfig,
    ModelInput,
    ModelOutput,
)
from halimede.core.config.validate import validate
from halimede.core.types import DataType

X = ModelInput("x", DataType.FP32, dims=(4,))


Y = ModelOutput("y", DataType.FP32, dims=(4,))


GOOD = ModelConfig(name="m", backend="python", max_batch_size=8, input=(X,), output=(Y,))


def problems(**changes: object) -> list[tuple[str, str]]:
    """(path, message) of every problem of the valid configuration with these changes."""
    return [(problem.path, problem.message) for problem in validate(replace(GOOD, **changes), "m")]  # type: ignore[arg-type]
