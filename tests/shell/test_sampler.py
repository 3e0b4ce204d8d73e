import resource
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from halimede.core.observe.samples import GpuSample, SystemSample
from halimede.core.types import DeviceMemory
from halimede.runtime.sampler import NvmlReader, Sample, Sampler, SystemReader

GIB = 1 << 30
BOUND_SECONDS = 10.0

MEMINFO = """\
MemTotal:       16777216 kB
MemFree:         1048576 kB
MemAvailable:   12582912 kB
HugePages_Total:       0
"""


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def machine(root: Path, **files: str) -> SystemReader:
    """A machine of 16 GiB, 4 of them used, whose clock has counted 100 busy ticks of 1000."""
    write(root, {"proc/stat": "cpu  60 10 30 880 20 0 0 0 5 5\ncpu0 1 2 3\n", "proc/meminfo": MEMINFO})
    write(root, {f"cgroup/{name}": text for name, text in files.items()})
    return SystemReader(root / "proc", root / "cgroup")


def test_utilization_is_over_the_time_between_two_reads(tmp_path: Path):
    reader = machine(tmp_path)
    assert reader.read() == SystemSample(None, 16 * GIB, 4 * GIB)

    # 200 ticks later: 50 of them busy (interrupts and stolen time too), 140 idle, 10 waiting for disks.
    write(tmp_path, {"proc/stat": "cpu  70 10 40 1020 30 10 10 10 5 5\n"})
    assert reader.read() == SystemSample(0.25, 16 * GIB, 4 * GIB)
    assert reader.read() == SystemSample(None, 16 * GIB, 4 * GIB)


def test_memory_in_a_container_is_limited_by_its_cgroup(tmp_path: Path):
    limits = {"memory.max": f"{2 * GIB}\n", "memory.current": f"{GIB}\n", "memory.stat": "anon 5\ninactive_file 1024\n"}
    reader = machine(tmp_path, **limits)

    assert reader.read() == SystemSample(None, 2 * GIB, GIB - 1024)


def test_a_control_group_of_version_1_counts_its_children(tmp_path: Path):
    limits = {
        "memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        "memory/memory.usage_in_bytes": f"{GIB}\n",
        "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 2048\n",
    }
    reader = machine(tmp_path, **limits)

    assert reader.read() == SystemSample(None, 2 * GIB, GIB - 2048)


def test_cgroup_without_a_limit_has_the_machines_memory(tmp_path: Path):
    unlimited = {"memory.max": "max\n", "memory.current": "5\n", "memory.stat": "inactive_file 1\n"}
    vast = {"memory.max": f"{2**63}\n", "memory.current": "5\n", "memory.stat": "inactive_file 1\n"}

    of_machine = SystemSample(None, 16 * GIB, 4 * GIB)
    assert machine(tmp_path / "a", **unlimited).read() == of_machine
    assert machine(tmp_path / "b", **vast).read() == of_machine


class FakeNvmlError(Exception):
    pass


class FakeNvml:
    """A driver with a whole GPU and a slice, of which it only reports the memory."""

    NVMLError = FakeNvmlError

    def __init__(self, has_driver: bool = True) -> None:
        self.has_driver = has_driver
        self.inits = 0
        self.energy = 5_000

    def nvmlInit(self) -> None:  # noqa: N802
        self.inits += 1
        if not self.has_driver:
            raise FakeNvmlError

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        handles = {"GPU-whole": "whole", "MIG-1": "mig"}
        if uuid not in handles:
            raise FakeNvmlError
        return handles[uuid]

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=80 * GIB, used=3 * GIB)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return self.only_whole(handle, SimpleNamespace(gpu=42, memory=7))

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        return self.only_whole(handle, 210_500)

    def nvmlDeviceGetPowerManagementLimit(self, handle: str) -> int:  # noqa: N802
        return self.only_whole(handle, 700_000)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        return self.only_whole(handle, self.energy)

    def only_whole(self, handle: str, value: Any) -> Any:
        if handle != "whole":
            raise FakeNvmlError
        return value


def test_every_known_device_is_read_and_energy_counts_from_the_first_read():
    nvml = FakeNvml()
    reader = NvmlReader(nvml, ["GPU-whole", "GPU-gone", "MIG-1"])
    reader.read()
    nvml.energy += 12_250

    assert reader.read() == [
        GpuSample("GPU-whole", 0.42, 80 * GIB, 3 * GIB, 210.5, 700.0, 12.25),
        GpuSample("MIG-1", None, 80 * GIB, 3 * GIB, None, None, None),
    ]
    assert nvml.inits == 1


def test_without_a_driver_no_gpus_exist_and_it_is_loaded_once():
    nvml = FakeNvml(has_driver=False)
    reader = NvmlReader(nvml, ["GPU-whole"])

    assert [reader.read(), reader.read()] == [[], []]
    assert nvml.inits == 1


class Readers:
    """Two readers that count; the system's fails at its second read."""

    def __init__(self) -> None:
        self.reads = 0
        self.threads: set[str] = set()
        self.read_thrice = threading.Event()

    def system(self) -> SystemSample:
        self.reads += 1
        self.threads.add(threading.current_thread().name)
        if self.reads == 2:
            raise OSError("gone")
        return SystemSample(None, self.reads, 0)

    def gpus(self) -> Sequence[GpuSample]:
        if self.reads >= 3:
            self.read_thrice.set()
        return [GpuSample(f"GPU-{self.reads}", None, None, None, None, None, None)]


def test_reader_that_fails_once_is_called_again():
    readers = Readers()
    sampler = Sampler(1, readers.system, readers.gpus)
    assert sampler.latest == Sample(None, ())

    sampler.start()
    assert readers.read_thrice.wait(BOUND_SECONDS)
    sampler.stop()

    assert readers.threads == {"metrics-sampler"}
    assert sampler.latest.system == SystemSample(None, readers.reads, 0)
    assert [gpu.uuid for gpu in sampler.latest.gpus] == [f"GPU-{readers.reads}"]


def test_unreadable_values_are_omitted_from_the_sample():
    gpu = GpuSample("GPU-1", None, None, None, None, None, None)
    asked = threading.Event()

    def broken() -> SystemSample:
        raise ValueError("no such field")

    def gpus() -> Sequence[GpuSample]:
        asked.set()
        return [gpu]

    sampler = Sampler(60_000, broken, gpus)
    sampler.start()
    assert asked.wait(BOUND_SECONDS)
    sampler.stop()

    assert sampler.latest == Sample(None, [gpu])


def test_stop_does_not_wait_for_the_interval_and_leaves_no_thread():
    read = threading.Event()

    def system() -> SystemSample:
        read.set()
        return SystemSample(0.5, 2, 1)

    sampler = Sampler(3_600_000, system, None)
    sampler.start()
    assert read.wait(BOUND_SECONDS)
    sampler.stop()
    sampler.stop()

    assert sampler.latest == Sample(SystemSample(0.5, 2, 1), ())
    assert "metrics-sampler" not in {thread.name for thread in threading.enumerate()}


def test_hanging_driver_does_not_delay_the_stop():
    asked, release = threading.Event(), threading.Event()

    def gpus() -> Sequence[GpuSample]:
        asked.set()
        release.wait(BOUND_SECONDS)
        return []

    sampler = Sampler(1, None, gpus)
    sampler.start()
    assert asked.wait(BOUND_SECONDS)
    begun = time.monotonic()
    sampler.stop()
    assert time.monotonic() - begun < 3  # it waits half a second for the driver
    release.set()
    sampler.stop()


def test_without_readers_no_thread_is_started():
    sampler = Sampler(1, None, None)
    sampler.start()
    sampler.wait_first(BOUND_SECONDS)

    assert "metrics-sampler" not in {thread.name for thread in threading.enumerate()}
    sampler.stop()
    assert sampler.latest == Sample(None, ())


class Memory:
    """A reader of one device and of the host, with the memory that the test sets; None if it cannot be read."""

    def __init__(self) -> None:
        self.device_bytes: int | None = 5
        self.host_bytes: int | None = 50

    def gpus(self) -> Sequence[GpuSample]:
        return [GpuSample("MIG-1", None, 100, self.device_bytes, None, None, None)]

    def host(self) -> int:
        if self.host_bytes is None:
            raise OSError("gone")
        return self.host_bytes


def test_memory_is_remembered_from_the_first_sample_on():
    memory = Memory()
    sampler = Sampler(3_600_000, None, memory.gpus, memory.host, shows_gpus=False)
    assert (sampler.device_memory, sampler.host_peak_bytes) == ({}, None)
    sampler.start()
    sampler.wait_first(BOUND_SECONDS)
    assert (sampler.device_memory, sampler.host_peak_bytes) == ({"MIG-1": DeviceMemory(5, 5, 5)}, 50)

    for device, host, expected in [
        (70, 90, (DeviceMemory(70, 5, 70), 90)),
        (20, 60, (DeviceMemory(20, 5, 70), 90)),
        (None, None, (DeviceMemory(20, 5, 70), 90)),
    ]:
        memory.device_bytes, memory.host_bytes = device, host
        sampler.sample_soon()
        end = time.monotonic() + BOUND_SECONDS
        while (sampler.device_memory["MIG-1"], sampler.host_peak_bytes) != expected:
            assert time.monotonic() < end
            time.sleep(0.002)
    assert sampler.latest == Sample(None, ())
    sampler.stop()


def test_memory_of_the_host_is_that_of_a_container_or_of_the_process(tmp_path: Path):
    unlimited = {"memory.max": "max\n", "memory.current": "500\n", "memory.stat": "inactive_file 100\n"}
    assert machine(tmp_path / "2", **unlimited).read_host_bytes() == 400
    limited = {
        "memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        "memory/memory.usage_in_bytes": "700\n",
        "memory/memory.stat": "total_inactive_file 100\n",
    }
    assert machine(tmp_path / "1", **limited).read_host_bytes() == 600
    of_machine = {**limited, "memory/memory.limit_in_bytes": f"{2**63}\n"}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert peak <= machine(tmp_path / "none", **of_machine).read_host_bytes() < 2 * peak


def test_this_machine_can_be_read():
    reader = SystemReader()
    sample = reader.read()

    assert sample.cpu_utilization is None
    assert sample.memory_total_bytes is not None
    assert sample.memory_used_bytes is not None
    assert 0 < sample.memory_used_bytes < sample.memory_total_bytes
