"""The parameters of Triton's FIL backend. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from halimede.backends.trees.files import FILENAMES
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.parameters import BOOLEANS, MOST_INT32, ValueReader, parameters_of

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
    reader = ValueReader(parameters_of(config))
    model_type = reader.text("model_type")
    if model_type and model_type not in FILENAMES:
        reader.wrong("model_type", f"one of {', '.join(FILENAMES)}")
    is_classifier = reader.flag("is_classifier", None)
    output_class = reader.flag("output_class", None)
    if is_classifier is not None and output_class is not None and is_classifier != output_class:
        reader.problems.append("parameters 'is_classifier' and 'output_class' are two names of one setting, but differ")
    options = TreeOptions(
        model_type=model_type,
        is_classifier=bool(is_classifier or output_class),
        predict_proba=reader.flag("predict_proba", default=False),
        threshold=_number(reader, "threshold"),
        allow_unknown_field=reader.flag("xgboost_allow_unknown_field", default=False),
        threads=_count(reader, "cpu_nthread", MOST_THREADS),
        ignored=_without_effect(reader),
    )
    reader.finish(model)
    return options


def _number(reader: ValueReader, key: str) -> float | None:
    text = reader.text(key)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        reader.wrong(key, "a number")
        return None
    return value


def _count(reader: ValueReader, key: str, most: int) -> int:
    """A number; 0 if it is not set, which Triton also writes as -1."""
    return 0 if reader.text(key) == "-1" else reader.count(key, most)


def _without_effect(reader: ValueReader) -> tuple[str, ...]:
    """The parameters that are set and change nothing; wrong values are problems, as in Triton."""
    found = []
    for key, values in WITHOUT_EFFECT.items():
        text = reader.text(key)
        if not text:
            continue
        found.append(key)
        if not values:
            _count(reader, key, MOST_INT32)
        elif text not in values and text.lower() not in values:
            reader.wrong(key, f"one of {', '.join(values)}")
    return tuple(found)
