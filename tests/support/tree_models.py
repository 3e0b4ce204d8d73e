"""Small tree models of every library, and runs of batches on them in the backend."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from halimede.backends.api import ModelSource, RunContext
from halimede.backends.trees.backend import FilBackend, TreeModel
from halimede.backends.trees.forest import Forest, checked
from halimede.backends.trees.options import read_options
from halimede.backends.trees.read_forest import read_forest
from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput, ModelParameter
from halimede.core.types import DataType, InferenceRequest, Placement
from halimede.workers.worker import BatchItem

FP32 = DataType.FP32
BACKEND = FilBackend()
CPU = Placement("m_0", 0, "CPU")
FEATURES = 5


def context(rows: int, *, cancelled: bool = False) -> RunContext:
    return RunContext([""], [rows], [BatchItem(1, InferenceRequest("m"), rows, cancelled=cancelled)])


def rows(count: int, seed: int = 0, missing: float = 0.1, features: int = FEATURES) -> np.ndarray:
    random = np.random.default_rng(seed)
    values = random.standard_normal((count, features)).astype(np.float32)
    values[random.random(values.shape) < missing] = np.nan
    return values


def targets(x: np.ndarray, classes: int = 2) -> np.ndarray:
    """A label that depends on the features, 0 to `classes` - 1."""
    score = np.nan_to_num(x[:, 0]) + np.nan_to_num(x[:, 1]) * np.nan_to_num(x[:, 2])
    return np.digitize(score, np.quantile(score, np.linspace(0, 1, classes + 1)[1:-1]))


def config(
    output: Sequence[int] | None = (1,), shap: Sequence[int] | None = None, features: int = FEATURES, **parameters: str
) -> ModelConfig:
    outputs = [("output__0", output), ("treeshap_output", shap)]
    return ModelConfig(
        max_batch_size=1024,
        input=(ModelInput("input__0", FP32, dims=(features,)),),
        output=tuple(ModelOutput(name, FP32, dims=tuple(dims)) for name, dims in outputs if dims is not None),
        parameters={key: ModelParameter(value) for key, value in parameters.items()},
    )


def read(path: Path, model_type: str) -> Forest:
    """The forest of a file that this test wrote: such files do not crash the reader, so it needs no process."""
    return checked(read_forest(path, model_type, allow_unknown_field=False), "m")


def xgboost_forest(tmp_path: Path, booster: Any) -> Forest:
    booster.save_model(tmp_path / "xgboost.json")
    return read(tmp_path / "xgboost.json", "xgboost_json")


def lightgbm_forest(tmp_path: Path, booster: Any) -> Forest:
    booster.save_model(tmp_path / "model.txt")
    return read(tmp_path / "model.txt", "lightgbm")


def sklearn_forest(tmp_path: Path, estimator: Any) -> Forest:
    import treelite

    treelite.sklearn.import_model(estimator).serialize(tmp_path / "checkpoint.tl")
    return read(tmp_path / "checkpoint.tl", "treelite_checkpoint")


def run(forest: Forest, settings: ModelConfig, x: np.ndarray, outputs: Sequence[str] = ("output__0",)) -> Any:
    """The output, or a dict of them if there are several."""
    model = TreeModel(settings, forest, read_options(settings, "m"), "m")
    results = model.create_instance(CPU).run({"input__0": x}, outputs, context(len(x)))
    return results[outputs[0]] if len(outputs) == 1 else results


def source(version: Path, filename: str = "", **options: str) -> ModelSource:
    return ModelSource("m", 1, version.parent, version / filename, options)
