"""The backend of scikit-learn's estimators. A pickle is code: it is read in worker processes only."""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from halimede.backends.api import ModelSource, RunContext
from halimede.backends.cores import available_cores
from halimede.backends.extras import install_extra
from halimede.backends.trees.sklearn_options import (
    INPUT,
    LABEL,
    METHOD_OF,
    PREDICTION,
    PROBABILITIES,
    estimator_input,
    limited_jobs,
    output_methods,
    tensor_output,
)
from halimede.core.config.autocomplete import DEFAULT_MAX_BATCH_SIZE, ModelSignature, TensorSignature, complete
from halimede.core.config.instances import instance_count
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.process_options import INTRA_OP_THREAD_COUNT, intra_op_threads
from halimede.core.repository.model_files import pickle_refusal
from halimede.core.types import DataType, Placement, invalid, unavailable, unsupported

log = logging.getLogger(__name__)

FILENAMES = ("model.joblib", "model.pkl")

_LABEL_TYPES = {"i": DataType.INT64, "u": DataType.INT64, "f": DataType.FP64, "b": DataType.BOOL}


class SklearnBackend:
    """`backend: "sklearn"`. The file is an estimator, written by joblib or pickle."""

    default_model_filename = FILENAMES[0]
    isolation = "process"
    unpickles = ("*",)
    parameters = (f"{METHOD_OF}*",)
    settings = ()

    def default_instance_count(self, kind: str) -> int:  # noqa: ARG002  # the interface's argument
        return 1

    def supports_gpu(self) -> bool:
        return False

    def preload(self, source: ModelSource) -> str:  # noqa: ARG002  # the interface's argument
        return f"{joblib_module.__module__}:{joblib_module.__name__}"

    def autocomplete(self, config: ModelConfig, source: ModelSource) -> ModelConfig:
        if config.input and config.output:
            return config
        estimator = _load(source)
        named = replace(config, name=source.name)
        signature = _signature(estimator, config, source.name)
        completed, notes = complete(named, signature, default_max_batch_size=DEFAULT_MAX_BATCH_SIZE)
        for note in notes:
            log.warning("%s", note, extra={"model": source.name})
        return completed

    def check(self, config: ModelConfig, source: ModelSource) -> None:
        self.load(config, source)

    def load(self, config: ModelConfig, source: ModelSource) -> "SklearnModel":
        methods = output_methods(config, source.name)
        estimator = _load(source)
        _check(estimator, config, methods, source.name)
        threads = intra_op_threads(config, available_cores(), instance_count(config))
        _limit_threads(estimator, threads, threads if INTRA_OP_THREAD_COUNT in config.parameters else None)
        return SklearnModel(estimator, config, methods)


class SklearnModel:
    def __init__(self, estimator: Any, config: ModelConfig, methods: Mapping[str, str]) -> None:
        self._estimator = estimator
        self._config = config
        self._methods = methods

    def create_instance(self, placement: Placement) -> "SklearnInstance":  # noqa: ARG002  # always on CPUs
        return SklearnInstance(self._estimator, self._config, self._methods)

    def close(self) -> None:
        self._estimator = None


class SklearnInstance:
    """A TensorInstance. Each method runs once per batch, whatever the number of its outputs."""

    def __init__(self, estimator: Any, config: ModelConfig, methods: Mapping[str, str]) -> None:
        self._estimator = estimator
        self._config = config
        self._methods = methods
        self._has_names = _has_names(estimator)

    def run(
        self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str], context: RunContext
    ) -> dict[str, NDArray[Any]]:
        rows = estimator_input(inputs, self._config)
        results: dict[str, Any] = {}
        with _without_name_warnings() if self._has_names else nullcontext():
            for method in {self._methods[name] for name in outputs}:
                results[method] = getattr(self._estimator, method)(rows)
        return {
            name: tensor_output(name, results[self._methods[name]], self._config, sum(context.rows)) for name in outputs
        }

    def close(self) -> None:
        self._estimator = None


def joblib_module() -> Any:
    """The joblib module. scikit-learn, which takes a second to import, is imported, too. ImportError."""
    import joblib  # type: ignore[import-untyped]  # the package has no types
    import sklearn  # type: ignore[import-untyped]  # noqa: F401  # the package has no types

    return joblib


def _load(source: ModelSource) -> Any:
    """The estimator. UNAVAILABLE without a file, UNSUPPORTED without scikit-learn or if no pickles are allowed,
    INVALID_ARG for other files."""
    path = _path(source)
    if not source.allow_pickle:
        # The server has looked at the file, but it may have been replaced since.
        problem = pickle_refusal("sklearn", path.name, "is read as a pickle")
        raise unsupported(f"model '{source.name}': {problem}")
    try:
        joblib = joblib_module()
    except ImportError as error:
        text = f"model '{source.name}': scikit-learn cannot be imported ({error}); {install_extra('trees')}"
        raise unsupported(text) from error
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            estimator = joblib.load(path)
    except ImportError as error:
        raise invalid(f"model '{source.name}': {path.name} needs a package that is not installed: {error}") from error
    except Exception as error:
        text = f"model '{source.name}': {path.name} cannot be read as a pickle: {type(error).__name__}: {error}"
        raise invalid(text) from error
    for text in sorted({" ".join(str(each.message).split()) for each in found}):
        log.warning("model '%s': %s", source.name, text)
    return estimator


def _path(source: ModelSource) -> Path:
    paths = [source.artifact, *(source.artifact.with_name(name) for name in FILENAMES)]
    found = next((path for path in paths if path.is_file()), None)
    if found is None or (found != source.artifact and source.artifact.name not in FILENAMES):
        raise unavailable(f"unable to find '{source.artifact}' for model '{source.name}'")
    return found


def _check(estimator: Any, config: ModelConfig, methods: Mapping[str, str], model: str) -> None:
    """INVALID_ARG if a method is missing, or the inputs have another number of columns than the estimator."""
    problems = [
        f"output '{name}' needs the method {method}, which the {type(estimator).__name__} of the file does not have"
        for name, method in methods.items()
        if not callable(getattr(estimator, method, None))
    ]
    expected = getattr(estimator, "n_features_in_", None)
    given = _columns(config)
    if expected is not None and given is not None and given != expected:
        problems.append(f"the inputs have {given} columns, the estimator was trained with {expected}")
    if problems:
        raise invalid(f"model '{model}': {'; '.join(problems)}")


def _columns(config: ModelConfig) -> int | None:
    """The columns of all inputs together; None if a dimension is open."""
    columns = 0
    for each in config.input:
        dims = each.dims if each.reshape is None else each.reshape.shape
        dims = dims if config.max_batch_size > 0 else dims[1:]
        if len(dims) != 1 or dims[0] < 0:
            return None
        columns += dims[0]
    return columns


def _signature(estimator: Any, config: ModelConfig, model: str) -> ModelSignature:
    """Inputs and outputs of classifiers and regressors. INVALID_ARG for other estimators."""
    features = getattr(estimator, "n_features_in_", None)
    classes = getattr(estimator, "classes_", None)
    targets = int(getattr(estimator, "n_outputs_", 1) or 1)
    if features is None or isinstance(classes, list) or not hasattr(estimator, "predict"):
        raise invalid(
            f"model '{model}': the inputs and outputs of a {type(estimator).__name__} cannot be completed from the "
            "file; write them in the configuration"
        )
    inputs = (TensorSignature(INPUT, DataType.FP64, (-1, int(features))),)
    outputs: tuple[TensorSignature, ...] = (TensorSignature(PREDICTION, DataType.FP64, (-1, targets)),)
    if classes is not None:
        outputs = (TensorSignature(LABEL, _LABEL_TYPES.get(classes.dtype.kind, DataType.BYTES), (-1, 1)),)
        if hasattr(estimator, "predict_proba"):
            outputs = (*outputs, TensorSignature(PROBABILITIES, DataType.FP64, (-1, len(classes))))
    named = {each.name for each in config.input}
    if len(config.input) == 1:
        inputs = (replace(inputs[0], name=next(iter(named))),)
    return ModelSignature(inputs, outputs)


def _has_names(estimator: Any) -> bool:
    """Whether the estimator, or a part of it, was trained on data frames."""
    parts = estimator.get_params(deep=True).values() if hasattr(estimator, "get_params") else ()
    return any(hasattr(each, "feature_names_in_") for each in (estimator, *parts))


@contextmanager
def _without_name_warnings() -> Iterator[None]:
    """Estimators that were trained on data frames warn at each call that arrays have no names of columns.

    A filter has its price: forests set all filters of warnings again for each tree, so this one costs them a
    twentieth of their time.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "X does not have valid feature names", UserWarning)
        yield


def _limit_threads(estimator: Any, share: int, configured: int | None) -> None:
    """Set every `n_jobs` in the estimator for `share` cores: it may say -1, for all cores of the machine."""
    if not hasattr(estimator, "get_params"):
        return
    parameters = estimator.get_params(deep=True)
    jobs: dict[str, Any] = {}
    for name, n_jobs in parameters.items():
        owner, _, last = name.rpartition("__")
        if last == "n_jobs":
            part = parameters.get(owner, estimator)
            is_sklearn = type(part).__module__.startswith("sklearn.")
            jobs[name] = configured or limited_jobs(n_jobs, share, none_is_one=is_sklearn)
    if jobs:
        estimator.set_params(**jobs)
