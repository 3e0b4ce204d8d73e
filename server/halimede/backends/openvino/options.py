"""Options for OpenVINO from a model's configuration. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from halimede.core.config.model_config import ModelConfig
from halimede.core.config.parameters import ValueReader, parameters_of, parse_number
from halimede.core.config.process_options import ISOLATION, PROCESS, THREAD, intra_op_threads, isolation_of
from halimede.core.types.error import clip

MOST_THREADS = 1024
HINTS = {hint: hint for hint in ("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT")}
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
    reader = ValueReader(parameters_of(config))
    has_bfloat16 = reader.choice("HINT_BF16", YES_NO, default=False)
    options = OpenVinoOptions(
        device=_device(reader),
        precision="bf16" if has_bfloat16 else "f32",
        performance_hint=reader.choice("PERFORMANCE_HINT", HINTS, default=""),
        streams=_streams(reader),
        inference_threads=reader.count("INFERENCE_NUM_THREADS", MOST_THREADS),
        compilation_threads=reader.count("COMPILATION_NUM_THREADS", MOST_THREADS),
        extension=_extension(reader, config),
        keeps_batch=reader.choice("SKIP_OV_DYNAMIC_BATCHSIZE", YES_NO, default=False),
        pads_batches=reader.choice("ENABLE_BATCH_PADDING", YES_NO, default=False),
        reshapes=reader.choice("RESHAPE_IO_LAYERS", YES_NO, default=False),
    )
    reader.finish(model)
    return options


def compile_properties(options: OpenVinoOptions, config: ModelConfig, *, cores: int, instances: int) -> Properties:
    """The properties with which OpenVINO compiles the model, for `instances` instances on `cores` cores.

    Instances in threads of one process share a compiled model, which has a stream and an equal part of the threads for
    each. An instance in a process has a model, with one stream, for itself.
    """
    in_processes = isolation_of(config, THREAD) == PROCESS
    properties: dict[str, str | int | bool] = {}
    # By default OpenVINO computes in bfloat16 on CPUs that have it, and in half precision on GPUs. NPUs have no single
    # precision.
    if options.precision != "f32" or not options.device.startswith("NPU"):
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


def _streams(reader: ValueReader) -> str:
    text = reader.text("NUM_STREAMS").upper()
    if text in ("", "AUTO", "NUMA") or parse_number(text, 1, MOST_THREADS) is not None:
        return text
    reader.wrong("NUM_STREAMS", f"AUTO, NUMA or a number from 1 to {MOST_THREADS}")
    return ""


def _device(reader: ValueReader) -> str:
    text = reader.text("TARGET_DEVICE").upper() or "CPU"
    if _DEVICE.fullmatch(text) is None:
        reader.wrong(
            "TARGET_DEVICE",
            f"CPU, GPU, NPU, or {', '.join(VIRTUAL_DEVICES)} with or without a list of devices (AUTO:GPU,CPU)",
        )
        return "CPU"
    return text


def _extension(reader: ValueReader, config: ModelConfig) -> str:
    """The path of a library, whose code runs when OpenVINO opens it: never in the server's own process."""
    path = reader.text("CPU_EXTENSION_PATH")
    if not path:
        return ""
    if not path.startswith("/"):
        reader.wrong("CPU_EXTENSION_PATH", "the absolute path of a library")
    elif isolation_of(config, THREAD) != PROCESS:
        reader.problems.append(
            f"parameter 'CPU_EXTENSION_PATH' is '{clip(path)}': the server does not load libraries of custom "
            f"operations; set parameter '{ISOLATION}' to '{PROCESS}', so that the model's own processes load it"
        )
    return path
