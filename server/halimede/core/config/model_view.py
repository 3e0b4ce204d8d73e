"""The data about a model that a front end needs to decode requests and to answer metadata and config calls."""

from collections.abc import Mapping
from dataclasses import dataclass

from halimede.core.config.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelView:
    """One ready version. `versions` are all ready versions, ascending; `labels` are the label lines per output."""

    name: str
    version: str
    versions: tuple[str, ...]
    config: ModelConfig
    labels: Mapping[str, tuple[str, ...]]
