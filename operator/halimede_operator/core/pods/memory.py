"""The memory that the pods of a template needed, and what follows from it for `mig.minMemory`.

The figures are peaks, which grow with the traffic. A new peak is taken over only if it is more than 5 % higher, so that
the status is not written again and again. Figures of an earlier template stay until pods of the newest one have theirs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from halimede_operator.core.pods.view import PodView
from halimede_operator.core.reading import moment_at, name_at, text_at
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.quantities import quantity
from halimede_operator.core.spec.types import Accelerator, AcceleratorType, Spec

MIB = 1 << 20
STEP_MIB = 256
"""A recommendation is a multiple of this."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Peaks in MiB; None if they are not known. `template_hash` is that of the measured pods.

    `device_peak` is the most that a device of one pod had in use, without what was in use before the load;
    `device_total` is the memory of that device. `host_peak` is the most that a pod had in use outside of devices.
    """

    template_hash: str
    measured_at: str
    device_peak: int | None = None
    device_total: int | None = None
    host_peak: int | None = None


def measured(old: object, spec: Spec | None, pods: Sequence[PodView], template_hash: str, now: str) -> Memory | None:
    """The memory to report. old: the old status. pods: those of the newest template that serve."""
    known = _read(old)
    if spec is None or not template_hash:
        return known
    found = _of_pods(pods, template_hash, now)
    if spec.workload.accelerator.type is AcceleratorType.SHARED:
        # Others use the device too.
        found = replace(found, device_peak=None, device_total=None)
    if found.device_peak is None and found.host_peak is None:
        return known
    if known is None or known.template_hash != template_hash:
        return found
    if not (_has_grown(known.device_peak, found.device_peak) or _has_grown(known.host_peak, found.host_peak)):
        return known
    device = found if _is_above(found.device_peak, known.device_peak) else known
    host = found if _is_above(found.host_peak, known.host_peak) else known
    return Memory(template_hash, now, device.device_peak, device.device_total, host.host_peak)


def _has_grown(old_mib: int | None, new_mib: int | None) -> bool:
    return new_mib is not None and (old_mib is None or new_mib > old_mib * 1.05)


def _is_above(new_mib: int | None, old_mib: int | None) -> bool:
    return new_mib is not None and (old_mib is None or new_mib > old_mib)


def _of_pods(pods: Sequence[PodView], template_hash: str, now: str) -> Memory:
    device_peak, device_total = max(_device_peaks(pods), default=(None, None))
    hosts = [
        _mib(peak)
        for pod in pods
        if pod.index is not None
        and pod.index.devices is not None
        and (peak := pod.index.devices.host_peak_bytes) is not None
    ]
    return Memory(template_hash, now, device_peak, device_total, max(hosts, default=None))


def _device_peaks(pods: Sequence[PodView]) -> Iterator[tuple[int, int]]:
    for pod in pods:
        for device in pod.index.devices.devices if pod.index and pod.index.devices else ():
            if device.peak_bytes is not None and device.before_bytes is not None and device.total_bytes is not None:
                yield _mib(max(0, device.peak_bytes - device.before_bytes)), _mib(device.total_bytes)


def _mib(size_bytes: int) -> int:
    return -(-size_bytes // MIB)


def _read(old: object) -> Memory | None:
    """The figures of the old status; None if they are malformed, because any user may have written it."""
    found = old.get("memory") if isinstance(old, dict) else None
    when, template_hash = moment_at(found, "measuredAt"), name_at(found, "templateHash")
    if when is None or not template_hash:
        return None
    return Memory(template_hash, when, *(_read_mib(found, name) for name in ("devicePeak", "deviceTotal", "hostPeak")))


def _read_mib(found: object, name: str) -> int | None:
    size = quantity(text_at(found, name))
    return _mib(int(size)) if size is not None and 0 <= size < 2**63 else None


def memory_json(memory: Memory | None) -> Object | None:
    """`status.memory`; None if nothing was measured."""
    if memory is None:
        return None
    sizes = {"devicePeak": memory.device_peak, "deviceTotal": memory.device_total, "hostPeak": memory.host_peak}
    return {
        **{name: f"{size}Mi" for name, size in sizes.items() if size is not None},
        "templateHash": memory.template_hash,
        "measuredAt": memory.measured_at,
    }


def recommended_mib(peak_mib: int, asked_mib: int) -> int | None:
    """The memory to ask for instead, if the peak is above what was asked for or below half of it; None otherwise."""
    wanted = -(-peak_mib // STEP_MIB) * STEP_MIB
    is_far_off = peak_mib > asked_mib or peak_mib < asked_mib / 2
    return wanted if is_far_off and wanted != asked_mib and wanted > 0 else None


def memory_advice(memory: Memory, accelerator: Accelerator) -> str:
    """What to add to the message of Placed; "" if the slices suit the model."""
    if accelerator.type != AcceleratorType.MIG or memory.device_peak is None or memory.device_total is None:
        return ""
    wanted = recommended_mib(memory.device_peak, accelerator.mig_min_memory_mib or memory.device_total)
    if wanted is None:
        return ""
    return (
        f"at most {memory.device_peak}Mi of {memory.device_total}Mi of a device were in use: "
        f"spec.accelerator.mig.minMemory {wanted}Mi suits the model better"
    )
