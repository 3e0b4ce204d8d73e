"""The utilization of a MIG slice, by NVML's GPU performance monitoring (GPM): NVML has no other value for slices.

GPM exists from Hopper on, and the driver says whether it works. It measures the time between two samples, and the whole
GPU instance: a slice that is one of several compute instances has the value of all of them.
"""

from typing import Any

# Any, in this module: pynvml has no types.


class SliceUtilization:
    """Keeps the last sample. Its methods raise `NVMLError` where the driver has no value."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """NVMLError for a whole GPU, and for a GPU or driver without GPM."""
        gpu = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        if not nvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        self._nvml = nvml
        self._gpu = gpu
        self._instance = nvml.nvmlDeviceGetGpuInstanceId(handle)
        self._last = nvml.nvmlGpmSampleAlloc()
        self._next = nvml.nvmlGpmSampleAlloc()
        self._take(self._last)

    def read(self) -> float | None:
        """The part of the time since the last read in which the slice executed something, from 0 to 1."""
        nvml = self._nvml
        self._take(self._next)
        wanted = nvml.c_nvmlGpmMetricsGet_t()
        wanted.version = nvml.NVML_GPM_METRICS_GET_VERSION
        wanted.numMetrics = 1
        wanted.sample1, wanted.sample2 = self._last, self._next
        wanted.metrics[0].metricId = nvml.NVML_GPM_METRIC_GRAPHICS_UTIL
        self._last, self._next = self._next, self._last
        found = nvml.nvmlGpmMetricsGet(wanted).metrics[0]
        # Also false for NaN.
        if found.nvmlReturn == nvml.NVML_SUCCESS and 0 <= found.value <= 100:
            return float(found.value) / 100
        return None

    def _take(self, sample: Any) -> None:
        self._nvml.nvmlGpmMigSampleGet(self._gpu, self._instance, sample)
