"""The values that a scrape reads: of each model version and its instances, the machine, and its devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from halimede.core.observe.busy import Busy
from halimede.core.observe.load import Load
from halimede.core.observe.stats import ModelStats
from halimede.core.types import ModelReadyState


@dataclass(frozen=True, slots=True)
class InstanceSample:
    """One scheduled instance of a model version. `device` is a UUID, or the kind of an instance without a device."""

    name: str
    device: str
    busy: Busy


@dataclass(slots=True)
class ModelSample:
    """One model version at the time of a scrape. `tags` are the configuration's metric_tags.

    `gpu_uuid` is the device that all instances are on; "" if there is no such device.
    """

    stats: ModelStats
    tags: Mapping[str, str] = field(default_factory=dict)
    load: Load = field(default_factory=Load)
    load_seconds: float = 0.0
    instances: Sequence[InstanceSample] = ()
    gpu_uuid: str = ""


@dataclass(frozen=True, slots=True)
class SystemSample:
    """The machine, or the server's container. None if a value is unknown (yet). Utilization is from 0 to 1."""

    cpu_utilization: float | None
    memory_total_bytes: int | None
    memory_used_bytes: int | None


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One GPU; None if the driver reports no value. Utilization is from 0 to 1, energy since the server start."""

    uuid: str
    utilization: float | None
    memory_total_bytes: int | None
    memory_used_bytes: int | None
    power_usage_watts: float | None
    power_limit_watts: float | None
    energy_joules: float | None


@dataclass(frozen=True, slots=True)
class StateSample:
    """The state of one model version in the repository index; `version` is "" if none is known."""

    model: str
    version: str
    state: ModelReadyState
