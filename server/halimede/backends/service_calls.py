"""What a model's code may request from the server besides inferences: one class for each request.

`workers.frames.services` is their codec on the channel between a worker process and the server. `NAME` is for messages.

Standard library only, for any CPython from 3.10 on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

METRIC_KINDS = ("COUNTER", "GAUGE", "HISTOGRAM")

ServiceResult = bool | int | float | None
"""What a call may result in."""

ResultT_co = TypeVar("ResultT_co", bound=ServiceResult, covariant=True)


class ServiceCall(Generic[ResultT_co]):
    """A call whose result is a ResultT_co."""

    __slots__ = ()
    NAME: ClassVar[str]


@dataclass(frozen=True, slots=True)
class LoadModel(ServiceCall[None]):
    """Load or reload a model.

    `config` (JSON) replaces the configuration of the repository unless it is "". `files` replace the files of the
    repository; their names are those of Triton's API, such as `file:1/model.onnx`.
    """

    NAME: ClassVar[str] = "load_model"
    model_name: str
    config: str
    files: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class UnloadModel(ServiceCall[None]):
    """Unload a model, and the models that it uses as steps if `unload_dependents` is set."""

    NAME: ClassVar[str] = "unload_model"
    model_name: str
    unload_dependents: bool


@dataclass(frozen=True, slots=True)
class IsModelReady(ServiceCall[bool]):
    """Whether a model is ready: any version of it if `model_version` is ""."""

    NAME: ClassVar[str] = "is_model_ready"
    model_name: str
    model_version: str


@dataclass(frozen=True, slots=True)
class NewMetricFamily(ServiceCall[int]):
    """Declare a metric family; `kind` is one of METRIC_KINDS. The result is its id."""

    NAME: ClassVar[str] = "metric_family_new"
    name: str
    description: str
    kind: str


@dataclass(frozen=True, slots=True)
class DeleteMetricFamily(ServiceCall[None]):
    """Delete a metric family with its metrics."""

    NAME: ClassVar[str] = "metric_family_delete"
    family: int


@dataclass(frozen=True, slots=True)
class NewMetric(ServiceCall[int]):
    """Declare a metric of a family. `buckets` are the upper bounds of a histogram. The result is its id."""

    NAME: ClassVar[str] = "metric_new"
    family: int
    labels: Mapping[str, str]
    buckets: Sequence[float]


@dataclass(frozen=True, slots=True)
class MetricValue(ServiceCall[float]):
    """The value of a counter or gauge."""

    NAME: ClassVar[str] = "metric_value"
    metric: int


@dataclass(frozen=True, slots=True)
class TakeState(ServiceCall[bool]):
    """Allow this process to keep more bytes for sequences. The result is whether they are within the server's bound.

    The worker process itself calls it, not the model's code.
    """

    NAME: ClassVar[str] = "take_state"
    size_bytes: int
