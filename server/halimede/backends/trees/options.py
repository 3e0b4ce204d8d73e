"""The parameters of Triton's FIL backend. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from halimede.backends.trees.files import FILENAMES
from halimede.core.config.model_config import ModelConfig
from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.error import clip

BOOLEANS = {"true": True, "1": True, "false": False, "0": False}

MOST_THREADS = 1024

# Parameters about the layout in memory and about GPUs: answers are the same with any value.
WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "storage_type": ("AUTO", "DENSE", "SPARSE", "SPARSE8"),
    "algo": ("ALGO_AUTO", "NAIVE", "TREE_REORG", "BATCH_TREE_REORG"),
    "layout": ("depth_first", "breadth_first", "layered"),
    "use_experimental_optimizations": tuple(BOOLEANS),
    "chunk_size": (),
    "blocks_per_sm": (),
    "threads_per_tree": (),
    "transfer_threshold": (),
}

PARAMETERS = (
    "model_type",
    "is_classifier",
    "output_class",
    "predict_proba",
    "threshold",
    "xgboost_allow_unknown_field",
    "cpu_nthread",
    *WITHOUT_EFFECT,
)
"""All parameters of a model that are read here."""

_COUNT_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TreeOptions:
    """`model_type` is "" if the configuration leaves it to the file; `threads` is 0 for a share of the cores.

    `threshold` is None if it is not set; then it is 0.5.
    """

    model_type: str = ""
    is_classifier: bool = False
    predict_proba: bool = False
    threshold: float | None = None
    allow_unknown_field: bool = False
    threads: int = 0
    ignored: tuple[str, ...] = ()

    @property
    def gives_class(self) -> bool:
        """Whether the output is the number of the class, not a probability or value."""
        return self.is_classifier and not self.predict_proba


def read_options(config: ModelConfig, model: str) -> TreeOptions:
    """The options in `config`; INVALID_ARG names every invalid parameter."""
    reader = _Reader(config)
    model_type = reader.text("model_type")
    if model_type and model_type not in FILENAMES:
        reader.problem("model_type", f"one of {', '.join(FILENAMES)}")
    is_classifier = reader.flag("is_classifier")
    output_class = reader.flag("output_class")
    if is_classifier is not None and output_class is not None and is_classifier != output_class:
        reader.problems.append("parameters 'is_classifier' and 'output_class' are two names of one setting, but differ")
    options = TreeOptions(
        model_type=model_type,
        is_classifier=bool(is_classifier or output_class),
        predict_proba=bool(reader.flag("predict_proba")),
        threshold=reader.number("threshold"),
        allow_unknown_field=bool(reader.flag("xgboost_allow_unknown_field")),
        threads=reader.count("cpu_nthread", MOST_THREADS) or 0,
        ignored=reader.without_effect(),
    )
    if reader.problems:
        raise InferenceError(ErrorCode.INVALID_ARG, f"model '{model}': {'; '.join(reader.problems)}")
    return options


class _Reader:
    """Reads parameters and collects the problems."""

    def __init__(self, config: ModelConfig) -> None:
        self._parameters = {key: value.string_value for key, value in config.parameters.items()}
        self.problems: list[str] = []

    def text(self, key: str) -> str:
        return self._parameters.get(key, "")

    def problem(self, key: str, expected: str) -> None:
        self.problems.append(f"parameter '{key}' is '{clip(self.text(key))}'; it must be {expected}")

    def flag(self, key: str) -> bool | None:
        text = self.text(key)
        if not text:
            return None
        if text.lower() not in BOOLEANS:
            self.problem(key, "'true' or 'false'")
        return BOOLEANS.get(text.lower())

    def number(self, key: str) -> float | None:
        text = self.text(key)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not isfinite(value):
            self.problem(key, "a number")
            return None
        return value

    def count(self, key: str, most: int) -> int | None:
        text = self.text(key)
        if not text or text == "-1":
            return None
        # int() refuses thousands of digits, and accepts digits of other scripts.
        if not (text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and int(text) <= most):
            self.problem(key, f"a number from 0 to {most}")
            return None
        return int(text)

    def without_effect(self) -> tuple[str, ...]:
        """The parameters that are set and change nothing; wrong values are problems, as in Triton."""
        found = []
        for key, values in WITHOUT_EFFECT.items():
            text = self.text(key)
            if not text:
                continue
            found.append(key)
            if not values:
                self.count(key, _COUNT_LIMIT)
            elif text not in values and text.lower() not in values:
                self.problem(key, f"one of {', '.join(values)}")
        return tuple(found)
