"""What the server says of itself and of its repository."""

from dataclasses import dataclass
from enum import Enum


class ModelReadyState(Enum):
    """A model version's state, under the names that the repository index prints."""

    UNKNOWN = "UNKNOWN"
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelIndexEntry:
    """One line of the repository index: a model that was never loaded has neither version nor state."""

    name: str
    version: str = ""
    state: ModelReadyState | None = None
    reason: str = ""
