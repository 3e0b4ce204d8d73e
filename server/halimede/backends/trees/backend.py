"""The plug-in class of tree models, and the loaded model."""

import logging
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from halimede.backends.api import ModelSource
from halimede.backends.cores import available_cores
from halimede.backends.onnxruntime.threads import plan_threads
from halimede.backends.read_memory import MEMORY_SETTING
from halimede.backends.trees.files import FILENAMES, default_type, type_of
from halimede.backends.trees.forest import Forest
from halimede.backends.trees.instance import SHAP_NAME, Answers, TreeInstance, check_categorical
from halimede.backends.trees.options import PARAMETERS, TreeOptions, read_options
from halimede.backends.trees.reader import read_file, read_head
from halimede.backends.trees.session import open_session
from halimede.backends.trees.shap import TreeShap
from halimede.backends.trees.signature import DEFAULT_MAX_BATCH_SIZE, checked_signature, completed_config
from halimede.core.config.autocomplete import batch_size_setting, is_complete
from halimede.core.config.instances import instance_count
from halimede.core.config.model_config import ModelConfig
from halimede.core.types import Placement, unavailable

log = logging.getLogger(__name__)

MOST_NAMES = 1000


class FilBackend:
    """`backend: "fil"`. The file's name depends on the parameter `model_type`, so the artifact is its directory."""

    default_model_filename = ""
    isolation = "thread"
    parameters = PARAMETERS
    settings = ("default-max-batch-size", MEMORY_SETTING)

    def default_instance_count(self, kind: str) -> int:
        return 2 if kind == "CPU" else 1

    def supports_gpu(self) -> bool:
        return False

    def autocomplete(self, config: ModelConfig, source: ModelSource) -> ModelConfig:
        """Complete tensors and batching from the model file. A complete configuration needs no reading."""
        if is_complete(config):
            return config
        options = read_options(config, source.name)
        forest = _read(source, options)
        named = replace(config, name=source.name)
        most = batch_size_setting("fil", source.options, DEFAULT_MAX_BATCH_SIZE)
        completed, notes = completed_config(named, forest, options, most)
        for note in notes:
            log.warning("%s", note, extra={"model": source.name})
        return completed

    def check(self, config: ModelConfig, source: ModelSource) -> None:
        self.load(config, source).close()

    def load(self, config: ModelConfig, source: ModelSource) -> "TreeModel":
        options = read_options(config, source.name)
        if options.ignored:
            what = "without effect, because they change no answer: parameters"
            names = ", ".join(options.ignored)
            log.warning("model '%s': %s %s", source.name, what, names, extra={"model": source.name})
        return TreeModel(config, _read(source, options), options, source.name)


class TreeModel:
    """One loaded version. Its sessions are safe to use from several threads; the instances share one if they may."""

    def __init__(self, config: ModelConfig, forest: Forest, options: TreeOptions, name: str) -> None:
        check_categorical(forest, name)
        signature = checked_signature(config, forest, options, name)
        # The work of SHAP values is several times that of predictions, so it is prepared only if it is asked for.
        shap = TreeShap(forest, name) if any(each.name == SHAP_NAME for each in config.output) else None
        self._answers = Answers(signature.plan, signature.dims, shap, signature.shap_dims)
        self._forest = forest
        self._name = name
        self._threads = plan_threads(available_cores(), instance_count(config), intra=options.threads)
        self._lock = threading.Lock()
        # Opened here, so that a model that cannot be loaded fails before its instances start.
        self._session: Any = open_session(forest, name, self._threads)

    def create_instance(self, placement: Placement) -> TreeInstance:  # noqa: ARG002  # always on CPUs
        return TreeInstance(self._next_session(), self._forest, self._answers)

    def close(self) -> None:
        self._session = None

    def _next_session(self) -> Any:
        with self._lock:
            session = self._session
            if not self._threads.share:
                self._session = None
        return session if session is not None else open_session(self._forest, self._name, self._threads)


def _read(source: ModelSource, options: TreeOptions) -> Forest:
    path, model_type = _model_file(source, options)
    return read_file(path, model_type, source, allow_unknown_field=options.allow_unknown_field)


def _model_file(source: ModelSource, options: TreeOptions) -> tuple[Path, str]:
    """The model file and its type. UNAVAILABLE if there is none."""
    artifact = source.artifact
    if artifact.is_file():
        return artifact, options.model_type or type_of(artifact.name, read_head(artifact))
    names = _names(artifact)
    model_type = options.model_type or default_type(names)
    if model_type is not None and FILENAMES[model_type] in names:
        return artifact / FILENAMES[model_type], model_type
    wanted = FILENAMES[model_type] if model_type else ", ".join(FILENAMES.values())
    found = f": there is {', '.join(sorted(names)[:3])}; name it as default_model_filename" if names else ""
    of_type = f" of model_type '{model_type}'" if model_type else ""
    raise unavailable(f"unable to find {wanted} in '{artifact}' for model '{source.name}'{of_type}{found}")


def _names(directory: Path) -> set[str]:
    try:
        with os.scandir(directory) as entries:
            return {entry.name for _, entry in zip(range(MOST_NAMES), entries, strict=False) if entry.is_file()}
    except OSError:
        return set()
