"""Options for OpenVINO from a model's configuration. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from halimede.core.config.model_config import ModelConfig
from halimede.core.config.process_options import ISOLATION, PROCESS, THREAD, intra_op_threads, isolation_of
from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.error import clip

MOST_THREADS = 1024
HINTS = ("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT")
VIRTUAL_DEVICES = ("AUTO", "MULTI", "HETERO", "BATCH")
YES_NO = {"YES": True, "NO": False}

# Such as "GPU.1", "AUTO:GPU,CPU", "MULTI:CPU(2),GPU(4)" and "AUTO:-NPU".
_DEVICE = re.compile(r"(CPU|GPU|NPU)(\.[0-9]+){0,2}|(AUTO|MULTI|HETERO|BATCH)(:[A-Z0-9.,()-]{1,256})?", re.ASCII)

PARAMETERS = (
    "TARGET_DEVICE",
    "PERFORMANCE_HINT",
    "NUM_STREAMS",
    "INFERENCE_NUM_THREADS",
    "COMPILATION_NUM_THREADS",
    "HINT_BF16",
    "SKIP_OV_DYNAMIC_BATCHSIZE",
    "ENABLE_BATCH_PADDING",
    "RESHAPE_IO_LAYERS",
    "CPU_EXTENSION_PATH",
)
"""All parameters of a model that are read here."""

Properties = Mapping[str, str | int | bool]


@dataclass(frozen=True, slots=True)
class OpenVinoOptions:
    """What the parameters say. Numbers are 0 and texts "" if not configured; `streams` is AUTO, NUMA or a number."""

    device: str = "CPU"
    precision: str = "f32"
    performance_hint: str = ""
    streams: str = ""
    inference_threads: int = 0
    compilation_threads: int = 0
    extension: str = ""
    keeps_batch: bool = False
    pads_batches: bool = False
    reshapes: bool = False

    def runs_on_cpu(self) -> bool:
        """Whether the CPU is the device, or may be one of a virtual device's."""
        kind, _, devices = self.device.partition(":")
        return kind == "CPU" or (kind in VIRTUAL_DEVICES and (not devices or "CPU" in devices.replace("-CPU", "")))


def read_options(config: ModelConfig, model: str) -> OpenVinoOptions:
    """The options in `config`; INVALID_ARG names every invalid parameter."""
    reader = _Reader(config)
    has_bfloat16 = reader.flag("HINT_BF16")
    options = OpenVinoOptions(
        device=reader.device(),
        precision="bf16" if has_bfloat16 else "f32",
        performance_hint=reader.choice("PERFORMANCE_HINT", HINTS),
        streams=reader.streams(),
        inference_threads=reader.count("INFERENCE_NUM_THREADS"),
        compilation_threads=reader.count("COMPILATION_NUM_THREADS"),
        extension=reader.extension(),
        keeps_batch=reader.flag("SKIP_OV_DYNAMIC_BATCHSIZE"),
        pads_batches=reader.flag("ENABLE_BATCH_PADDING"),
        reshapes=reader.flag("RESHAPE_IO_LAYERS"),
    )
    if reader.problems:
        raise InferenceError(ErrorCode.INVALID_ARG, f"model '{model}': {'; '.join(reader.problems)}")
    return options


def compile_properties(options: OpenVinoOptions, config: ModelConfig, *, cores: int, instances: int) -> Properties:
    """The properties with which OpenVINO compiles the model, for `instances` instances on `cores` cores.

    Instances in threads of one process share a compiled model, which has a stream and an equal part of the threads for
    each. An instance in a process has a model, with one stream, for itself.
    """
    in_processes = isolation_of(config, THREAD) == PROCESS
    properties: dict[str, str | int | bool] = {}
    if not options.device.startswith("NPU"):
        # By default OpenVINO computes in bfloat16 on CPUs that have it, and in half precision on GPUs. NPUs have no
        # single precision.
        properties["INFERENCE_PRECISION_HINT"] = options.precision
    elif options.precision != "f32":
        properties["INFERENCE_PRECISION_HINT"] = options.precision
    if options.performance_hint:
        properties["PERFORMANCE_HINT"] = options.performance_hint
    if options.runs_on_cpu():
        # Every model would be pinned to the first cores, beside idle ones.
        properties["ENABLE_CPU_PINNING"] = False
        threads = intra_op_threads(config, cores, instances) if in_processes else cores
        properties["INFERENCE_NUM_THREADS"] = options.inference_threads or threads
        if not options.performance_hint:
            properties["NUM_STREAMS"] = 1 if in_processes else instances
    elif options.inference_threads:
        properties["INFERENCE_NUM_THREADS"] = options.inference_threads
    if options.streams:
        properties["NUM_STREAMS"] = options.streams
    if options.compilation_threads:
        properties["COMPILATION_NUM_THREADS"] = options.compilation_threads
    return properties


class _Reader:
    """Reads parameters and collects the problems."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._parameters = {key: value.string_value for key, value in config.parameters.items()}
        self.problems: list[str] = []

    def count(self, key: str) -> int:
        text = self._parameters.get(key, "") or "0"
        if not _is_number(text, MOST_THREADS):
            self._wrong(key, f"a number from 0 to {MOST_THREADS}")
            return 0
        return int(text)

    def flag(self, key: str) -> bool:
        return YES_NO.get(self.choice(key, tuple(YES_NO)), False)

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        text = self._parameters.get(key, "").upper()
        if text and text not in choices:
            self._wrong(key, f"one of {', '.join(choices)}")
            return ""
        return text

    def streams(self) -> str:
        text = self._parameters.get("NUM_STREAMS", "").upper()
        if text and text not in ("AUTO", "NUMA") and (not _is_number(text, MOST_THREADS) or int(text) == 0):
            self._wrong("NUM_STREAMS", f"AUTO, NUMA or a number from 1 to {MOST_THREADS}")
            return ""
        return text

    def device(self) -> str:
        text = self._parameters.get("TARGET_DEVICE", "").upper() or "CPU"
        if _DEVICE.fullmatch(text) is None:
            self._wrong(
                "TARGET_DEVICE",
                f"CPU, GPU, NPU, or {', '.join(VIRTUAL_DEVICES)} with or without a list of devices (AUTO:GPU,CPU)",
            )
            return "CPU"
        return text

    def extension(self) -> str:
        """The path of a library, whose code runs when OpenVINO opens it: never in the server's own process."""
        path = self._parameters.get("CPU_EXTENSION_PATH", "")
        if not path:
            return ""
        if not path.startswith("/"):
            self._wrong("CPU_EXTENSION_PATH", "the absolute path of a library")
        elif isolation_of(self._config, THREAD) != PROCESS:
            self.problems.append(
                f"parameter 'CPU_EXTENSION_PATH' is '{clip(path)}': the server does not load libraries of custom "
                f"operations; set parameter '{ISOLATION}' to '{PROCESS}', so that the model's own processes load it"
            )
        return path

    def _wrong(self, key: str, right: str) -> None:
        self.problems.append(f"parameter '{key}' is '{clip(self._parameters[key])}'; it must be {right}")


def _is_number(text: str, most: int) -> bool:
    # int() refuses thousands of digits, and accepts digits of other scripts.
    return text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and int(text) <= most
