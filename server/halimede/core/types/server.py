"""Metadata of the server, and the entries of its repository index."""

from dataclasses import dataclass
from enum import Enum


class ModelReadyState(Enum):
    """The state of a model version, with the names of the repository index."""

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
class WorkerHealth:
    """The health of a model version's worker processes. `failure` is "" if none died recently."""

    failure: str = ""
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class ModelIndexEntry:
    """One entry of the repository index; a model that was never loaded has neither version nor state.

    `workers` is None if the instances run on threads.
    """

    name: str
    version: str = ""
    state: ModelReadyState | None = None
    reason: str = ""
    workers: WorkerHealth | None = None
