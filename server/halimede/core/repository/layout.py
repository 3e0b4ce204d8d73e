"""The meaning of names in a model repository: versions, artefacts, backends, models. Pure functions over listings."""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from halimede.core.config.model_config import ModelConfig
from halimede.core.config.names import model_name_problem
from halimede.core.types import Device, InferenceError
from halimede.core.types.error import clip, invalid

MAX_VERSION = 2**63 - 1

# Directories that the layout uses for other purposes than versions. No warning is logged for them, nor for hidden ones
# (a mounted ConfigMap has `..data`).
_OTHER_DIRECTORIES = frozenset({"configs", "warmup", "initial_state", "__pycache__"})
_VERSION = re.compile(r"[1-9][0-9]*", re.ASCII)

NOT_MODELS = frozenset({"lost+found", "__MACOSX"})
"""Names that file systems and archives use for other purposes; they are ignored, like hidden names."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A model file or directory with a well-known name, and its backend; `platform` is "" if it has no name."""

    filename: str
    backend: str
    platform: str = ""


DEFAULT_ARTIFACTS = (
    Artifact("model.savedmodel", "tensorflow", "tensorflow_savedmodel"),
    Artifact("model.graphdef", "tensorflow", "tensorflow_graphdef"),
    Artifact("model.plan", "tensorrt", "tensorrt_plan"),
    Artifact("model.onnx", "onnxruntime", "onnxruntime_onnx"),
    Artifact("model.xml", "openvino"),
    Artifact("model.pt", "pytorch", "pytorch_libtorch"),
    Artifact("model.pt2", "pytorch", "torch_aoti"),
    Artifact("model.py", "python"),
    Artifact("model.dali", "dali"),
    Artifact("dali.py", "dali"),
    Artifact("xgboost.ubj", "fil"),
    Artifact("xgboost.json", "fil"),
    Artifact("xgboost.model", "fil"),
    Artifact("checkpoint.tl", "fil"),
    Artifact("model.txt", "fil"),
    Artifact("model.joblib", "sklearn"),
    Artifact("model.pkl", "sklearn"),
)
"""If a version directory contains several of them, the first in this order decides, as in Triton."""

PLATFORMS = {artifact.platform: artifact.backend for artifact in DEFAULT_ARTIFACTS if artifact.platform}
"""Backend by platform name, without ENSEMBLE_PLATFORM, which has no backend."""

SHARED_SUFFIXES = frozenset({".json", ".model", ".txt"})
"""Suffixes of well-known names that other files have as well."""

# The first of each suffix, as DEFAULT_ARTIFACTS has them.
_SUFFIXES = {
    suffix: artifact
    for artifact in reversed(DEFAULT_ARTIFACTS)
    if (suffix := PurePath(artifact.filename).suffix) not in SHARED_SUFFIXES
}

_KERAS = (".keras", ".h5")

ENSEMBLE_PLATFORM = "ensemble"


def version_directories(names: Iterable[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The versions among the directories of a model directory, ascending, and one warning for each invalid name."""
    versions: list[int] = []
    warnings: list[str] = []
    for name in sorted(names):
        if name in _OTHER_DIRECTORIES or name.startswith("."):
            continue
        if problem := _version_problem(name):
            warnings.append(f"ignoring version directory {clip(name)!a}: {problem}")
        else:
            versions.append(int(name))
    return tuple(sorted(versions)), tuple(warnings)


def is_version(name: str) -> bool:
    """Whether a directory of this name is a version of its model."""
    return _version_problem(name) is None


def is_model_directory(names: Iterable[str]) -> bool:
    """Whether a directory with these names is a model: it has a configuration, under any name, or a version.

    A config.json is none: models of other tools, such as those of Hugging Face, have one.
    """
    return any(
        name == "configs" or (name.startswith("config.") and name != "config.json") or is_version(name)
        for name in names
    )


def no_model_warnings(repository: PurePath, names: Iterable[str], ignored: Sequence[str]) -> list[str]:
    """Warnings about a repository without a model. `names` are its entries, `ignored` is why they are not models."""
    names = list(names)
    signs = sorted(name for name in names if is_model_directory((name,)))
    if signs:
        listed = ", ".join(f"'{clip(name)}'" for name in signs[:3])
        return [
            f"there is no model in repository '{repository}': it contains {listed} and looks like a model itself; give "
            f"the folder above as the repository: '{repository.parent}'"
        ]
    files = sorted(set(names) & {artifact.filename for artifact in DEFAULT_ARTIFACTS})
    if files and is_version(repository.name):
        return [
            f"there is no model in repository '{repository}': it contains '{files[0]}' and looks like a version of a "
            f"model; give the folder of all models as the repository: '{repository.parent.parent}'"
        ]
    example = repository / "MODEL" / "1" / (files[0] if files else "model.onnx")
    text = (
        f"there is no model in repository '{repository}': a model is a folder with a version in it, such as '{example}'"
    )
    return [*ignored, text]


def _version_problem(name: str) -> str | None:
    if _VERSION.fullmatch(name) is None:
        digits = name.lstrip("0")
        if digits != name and (not digits or _VERSION.fullmatch(digits)):
            return "a version is at least 1" if not digits else "a version has no leading zeros"
        return "a version is a decimal number, at least 1"
    # The length first: int() of a very long text is slow, and refused beyond 4300 digits.
    if len(name) > len(str(MAX_VERSION)) or int(name) > MAX_VERSION:
        return f"a version is at most {MAX_VERSION}"
    return None


def detect_backend(config: ModelConfig, directory_name: str, files: Collection[str]) -> ModelConfig:
    """The configuration with `backend` and `platform` filled in if they follow from each other or from the files.

    `files` are the names in the lowest version directory. In this order: the configuration's own backend or platform, a
    well-known artefact, the suffix of the directory name (`resnet.onnxruntime`). INVALID_ARG if none
    of them gives a backend, or if platform and backend contradict each other.
    """
    if config.platform == ENSEMBLE_PLATFORM or config.ensemble_scheduling is not None:
        return _as_ensemble(config, clip(config.name or directory_name))
    if config.platform:
        return _with_filename(replace(config, backend=_backend_of_platform(config, directory_name)), files)
    if config.backend:
        return _with_filename(replace(config, platform=_platform_of_backend(config, files)), files)
    for artifact in DEFAULT_ARTIFACTS:
        if artifact.filename in files:
            return _with_filename(replace(config, backend=artifact.backend, platform=artifact.platform), files)
    stem, _, suffix = directory_name.rpartition(".")
    if not stem or not suffix:
        raise invalid(
            f"Invalid model name: Could not determine backend for model '{clip(directory_name)}' with no backend in "
            f"model configuration. Expected model name of the form 'model.<backend_name>'.{_hint_at_file(files)}"
        )
    named = replace(config, backend=suffix)
    return _with_filename(replace(named, platform=_platform_of_backend(named, files)), files)


def _with_filename(config: ModelConfig, files: Collection[str]) -> ModelConfig:
    """With the file's name, if it is a well-known one of the backend and of the platform, but not the backend's first
    one, which is the backend's default."""
    own = [artifact for artifact in DEFAULT_ARTIFACTS if artifact.backend == config.backend]
    if config.default_model_filename or config.runtime or not own:
        return config
    found = [each for each in own if each.filename in files and config.platform in ("", each.platform)]
    if not found or found[0] is own[0]:
        return config
    return replace(config, default_model_filename=found[0].filename)


def _hint_at_file(files: Collection[str]) -> str:
    """A hint for a version whose model file does not have the well-known name, or is of a kind that is not served."""
    for name in sorted(files):
        if name == "saved_model.pb":
            return " The first version itself is a SavedModel: move its files into 'model.savedmodel' in it."
        if PurePath(name).suffix in _KERAS:
            return f" The first version has the Keras model '{clip(name)}', which is not served: export a SavedModel."
        wanted = _SUFFIXES.get(PurePath(name).suffix)
        if wanted is not None:
            return (
                f" The first version has '{clip(name)}' instead of '{wanted.filename}': rename it, or write "
                f'backend: "{wanted.backend}" and default_model_filename: "{clip(name)}" in config.pbtxt.'
            )
    return ""


def _as_ensemble(config: ModelConfig, name: str) -> ModelConfig:
    if config.platform == ENSEMBLE_PLATFORM:
        if config.backend:
            text = f"Ensemble model '{name}' must have platform type '{ENSEMBLE_PLATFORM}' and empty backend type"
            raise invalid(text)
    elif config.platform or config.backend not in ("", ENSEMBLE_PLATFORM):
        raise invalid(f"ensemble scheduling cannot be set for model '{name}' whose platform is not {ENSEMBLE_PLATFORM}")
    return replace(config, platform=ENSEMBLE_PLATFORM, backend="")


def _backend_of_platform(config: ModelConfig, directory_name: str) -> str:
    expected = PLATFORMS.get(config.platform)
    if expected is None:
        # A backend that this table does not know may use any platform text; those it knows have names of their own.
        if config.backend and config.backend not in PLATFORMS.values():
            return config.backend
        if config.backend:
            raise _unexpected_pair(config)
        raise invalid(
            f"unexpected platform type '{clip(config.platform)}' for {clip(directory_name)}; expected one of "
            f"{', '.join((*PLATFORMS, ENSEMBLE_PLATFORM))}, or a 'backend'"
        )
    if config.backend not in ("", expected):
        raise _unexpected_pair(config)
    return expected


def _platform_of_backend(config: ModelConfig, files: Collection[str]) -> str:
    """The platform name of the backend; "" if it has none."""
    own = [artifact for artifact in DEFAULT_ARTIFACTS if artifact.backend == config.backend]
    # `runtime` replaces the backend's own library, and then the file's format does not determine the platform.
    if not own or config.runtime:
        return ""
    for artifact in own:
        suffix = artifact.filename.removeprefix("model")
        if config.default_model_filename.endswith(suffix):
            return artifact.platform
    for artifact in own:
        if artifact.filename in files:
            return artifact.platform
    return own[0].platform


def _unexpected_pair(config: ModelConfig) -> InferenceError:
    return invalid(f"unexpected 'platform' and 'backend' pair, got:{clip(config.platform)}, {clip(config.backend)}")


SEVERAL_REPOSITORIES = "model appears in two or more repositories"
"""The exact text in the index for such a model: scripts search for it."""


def model_filename(config: ModelConfig, usual: str, device: Device | None = None) -> str:
    """The name of the model file in a version directory, for instances on a device, None for the CPU: the one for the
    device's compute capability, else the configured one, else the platform's, else `usual`, the backend's."""
    platforms = {each.platform: each.filename for each in DEFAULT_ARTIFACTS if config.backend in ("", each.backend)}
    of_platform = platforms.get(config.platform, "") if config.platform else ""
    named = config.default_model_filename or of_platform or usual
    return named if device is None else config.cc_model_filenames.get(device.capability_text, named)


def duplicate_problem(paths: Sequence[str]) -> str:
    """Why a model that is in several repositories is not loaded, for the log. `paths` are its directories."""
    return f"{SEVERAL_REPOSITORIES}: {', '.join(paths)}"


def no_name_problem(name: str) -> str | None:
    """The problem of an empty name in a call to load or unload a model; None for another name."""
    return None if name.strip() else "Model name cannot be empty. Please enter a valid name to deploy."


def load_name_problem(name: str) -> str | None:
    """The problem of a name in a call to load a model; None for a valid name. The first texts are Triton's."""
    if problem := no_name_problem(name):
        return problem
    if "/" in name or name.strip() == "..":
        return f"invalid model name '{clip(name)}', model name must not contain path traversal characters"
    return model_name_problem(name)


def is_source_name(name: str) -> bool:
    """Whether a file of this name belongs to a model's sources, and was not made by an editor or interpreter."""
    return not name.startswith(".") and not name.endswith("~") and name != "__pycache__"
