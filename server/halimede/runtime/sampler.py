"""Samples the machine and its devices on a thread of its own, because a driver may block and the event loop must not.

Memory is that of the container if a control group limits it, because its limit is reached before the machine's. CPU
utilization is the machine's, as in Triton.
"""

import importlib
import resource
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from halimede.core.inventory import Inventory
from halimede.core.observe.samples import GpuSample, SystemSample
from halimede.core.types import DeviceMemory
from halimede.memory_group import UNLIMITED, MemoryGroups
from halimede.runtime.gpm import SliceUtilization

T = TypeVar("T")

STOP_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Sample:
    """The last values. `system` is None and `gpus` is empty if they are not sampled, or could not be read."""

    system: SystemSample | None = None
    gpus: Sequence[GpuSample] = ()


class Sampler:
    """Calls its readers every `interval_ms` on its own thread, between `start` and `stop`.

    Nothing here raises. A reader that fails leaves its part of the sample empty, because an old value would mislead.
    Memory is remembered since the start. `shows_gpus`: whether `latest` has the GPUs.
    """

    def __init__(
        self,
        interval_ms: int,
        read_system: Callable[[], SystemSample] | None,
        read_gpus: Callable[[], Sequence[GpuSample]] | None,
        read_host_bytes: Callable[[], int] | None = None,
        *,
        shows_gpus: bool = True,
    ) -> None:
        self._interval_s = interval_ms / 1000
        self._read_system = read_system
        self._read_gpus = read_gpus
        self._read_host_bytes = read_host_bytes
        self._shows_gpus = shows_gpus
        self._is_stopping = False
        self._wanted = threading.Event()
        self._sampled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-sampler", daemon=True)
        # Written by the sampler's thread only; the mapping is replaced, never changed.
        self.latest = Sample()
        """The last sample. Any thread may read this."""
        self.device_memory: Mapping[str, DeviceMemory] = {}
        """The memory of each device that the driver reports, by UUID. Any thread may read this."""
        self.host_peak_bytes: int | None = None
        """The peak of the memory outside of devices; None if it could not be read. Any thread may read this."""

    def start(self) -> None:
        """Start sampling; called once. Without readers no thread is started."""
        if self._read_system is not None or self._read_gpus is not None or self._read_host_bytes is not None:
            self._thread.start()
        else:
            self._sampled.set()

    def wait_first(self, limit_s: float) -> None:
        """Block until the first sample is taken, at most for this time. Memory in use before a load is read in it."""
        self._sampled.wait(limit_s)

    def sample_soon(self) -> None:
        """Take the next sample at once, because memory has probably changed."""
        self._wanted.set()

    def stop(self) -> None:
        """Stop sampling, and wait at most STOP_SECONDS for a driver call that hangs."""
        self._is_stopping = True
        self._wanted.set()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while not self._is_stopping:
            self._wanted.clear()
            system = _attempt(self._read_system)
            gpus = _attempt(self._read_gpus) or ()
            self.device_memory = _after(self.device_memory, gpus)
            host_bytes = _attempt(self._read_host_bytes)
            if host_bytes is not None:
                self.host_peak_bytes = max(host_bytes, self.host_peak_bytes or 0)
            self.latest = Sample(system, gpus if self._shows_gpus else ())
            self._sampled.set()
            # Again, because a stop that came before the event was cleared must not be missed.
            if not self._is_stopping:
                self._wanted.wait(self._interval_s)


def _after(memory: Mapping[str, DeviceMemory], gpus: Sequence[GpuSample]) -> Mapping[str, DeviceMemory]:
    """The memory after these samples. Of a device that is read no longer the last values stay."""
    used = {gpu.uuid: gpu.memory_used_bytes for gpu in gpus if gpu.memory_used_bytes is not None}
    return {
        **memory,
        **{
            uuid: memory[uuid].then(now) if uuid in memory else DeviceMemory(now, now, now)
            for uuid, now in used.items()
        },
    }


def make_sampler(interval_ms: int, inventory: Inventory, *, cpu: bool, gpu: bool) -> Sampler:
    """A sampler of this machine and these devices. `cpu` and `gpu`: whether `latest` has their values."""
    system = SystemReader()
    # Imported only where it is needed: it takes milliseconds.
    nvml = importlib.import_module("pynvml") if inventory.devices else None
    uuids = [device.uuid for device in inventory.devices]
    return Sampler(
        interval_ms,
        system.read if cpu else None,
        NvmlReader(nvml, uuids).read if nvml else None,
        system.read_host_bytes,
        shows_gpus=gpu,
    )


class SystemReader:
    """Reads CPU and memory from the kernel's files. Utilization is over the time since the last `read`."""

    def __init__(self, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._groups = MemoryGroups(proc, cgroup)
        self._last_cpu: tuple[int, int] | None = None

    def read(self) -> SystemSample:
        """A sample; the first one has no utilization. OSError or ValueError when the files are not as expected."""
        total, used = self._memory()
        return SystemSample(self._cpu_utilization(), total, used)

    def read_host_bytes(self) -> int:
        """The memory in use by the container without file cache; without a control group the peak of this process."""
        found = self._cgroup_memory()
        # Outside of containers, version 1 has a group for the whole machine, which has no limit.
        if found is not None and (found[0] == UNLIMITED or found[0] < self._machine_memory()["MemTotal"] * 1024):
            return found[1]
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _cpu_utilization(self) -> float | None:
        last = self._last_cpu
        self._last_cpu = busy, total = _cpu_ticks((self._proc / "stat").read_text())
        if last is None or total <= last[1]:
            return None
        # The kernel corrects its idle counters now and then, so that a difference may be off by a tick.
        return min(1.0, max(0.0, (busy - last[0]) / (total - last[1])))

    def _memory(self) -> tuple[int, int]:
        fields = self._machine_memory()
        total = fields["MemTotal"] * 1024
        found = self._cgroup_memory()
        if found is not None and found[0] < total:
            return found
        return total, total - fields["MemAvailable"] * 1024

    def _machine_memory(self) -> dict[str, int]:
        return _fields((self._proc / "meminfo").read_text())

    def _cgroup_memory(self) -> tuple[int, int] | None:
        """Limit and usage of the control group; None without one. The limit may be above the machine's memory."""
        use = self._groups.read()
        return None if use is None else (use.limit_bytes, max(0, use.used_bytes - use.inactive_file_bytes))


class NvmlReader:
    """Reads devices through the `pynvml` module, GPUs and MIG slices alike; none without a driver."""

    def __init__(self, nvml: Any, uuids: Sequence[str]) -> None:  # Any: the module has no types
        self._nvml = nvml
        self._uuids = uuids
        self._devices: list[_GpuDevice] | None = None

    def read(self) -> list[GpuSample]:
        """One sample per device that the driver knows, in the order of the UUIDs."""
        if self._devices is None:
            self._devices = self._attempt(self._open) or []
        return [self._sample(device) for device in self._devices]

    def _open(self) -> "list[_GpuDevice]":
        self._nvml.nvmlInit()
        handles = {uuid: self._handle(uuid) for uuid in self._uuids}
        return [
            _GpuDevice(handle, uuid, self._energy_millijoules(handle), self._of_slice(handle))
            for uuid, handle in handles.items()
            if handle is not None
        ]

    def _of_slice(self, handle: Any) -> SliceUtilization | None:  # Any: as above
        return self._attempt(lambda: SliceUtilization(self._nvml, handle))

    def _handle(self, uuid: str) -> Any:  # Any: as above
        return self._attempt(lambda: self._nvml.nvmlDeviceGetHandleByUUID(uuid))

    def _sample(self, device: "_GpuDevice") -> GpuSample:
        nvml, handle = self._nvml, device.handle
        memory = self._attempt(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        first, energy = device.first_millijoules, self._energy_millijoules(handle)
        return GpuSample(
            uuid=device.uuid,
            utilization=self._attempt(
                lambda: (
                    nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                    if device.of_slice is None
                    else device.of_slice.read()
                )
            ),
            memory_total_bytes=memory and memory.total,
            memory_used_bytes=memory and memory.used,
            power_usage_watts=self._attempt(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            power_limit_watts=self._attempt(lambda: nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000),
            energy_joules=None if first is None or energy is None else (energy - first) / 1000,
        )

    def _energy_millijoules(self, handle: Any) -> int | None:  # Any: the module has no types
        return self._attempt(lambda: int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle)))

    def _attempt(self, ask: Callable[[], T]) -> T | None:
        """A value from the driver; None without a driver, or if the GPU has no such value (as MIG slices)."""
        try:
            return ask()
        except self._nvml.NVMLError:
            return None


@dataclass(frozen=True, slots=True)
class _GpuDevice:
    handle: Any  # the module has no types
    uuid: str
    first_millijoules: int | None
    of_slice: SliceUtilization | None
    """None for a whole GPU, and for a slice without GPM."""


def _attempt(read: Callable[[], T] | None) -> T | None:
    if read is None:
        return None
    try:
        return read()
    except Exception:  # noqa: BLE001 - a driver's failure must not stop the server: the metrics lack a value
        return None


def _cpu_ticks(stat: str) -> tuple[int, int]:
    """Busy and total ticks since boot, from the first line of /proc/stat: `cpu user nice system idle iowait …`.

    Guest time, after the first eight numbers, is counted in user and nice already.
    """
    ticks = [int(number) for number in stat.split("\n", 1)[0].split()[1:9]]
    total = sum(ticks)
    return total - ticks[3] - ticks[4], total


def _fields(text: str) -> dict[str, int]:
    """Lines of a name and a number, as in /proc/meminfo (`MemTotal:  123 kB`)."""
    fields: dict[str, int] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1:
            fields[words[0].rstrip(":")] = int(words[1])
    return fields
