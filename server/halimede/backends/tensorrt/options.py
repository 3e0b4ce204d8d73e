"""Options of the backend and of a model, from `--backend-config` and the model's configuration. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from halimede.core.config.model_config import ModelConfig, ModelPriority
from halimede.core.config.parameters import BOOLEANS, number_setting, parameters_of
from halimede.core.types import InferenceError
from halimede.core.types.error import clip, invalid, unsupported

STRATEGIES = ("STATIC", "ON_PROFILE_CHANGE")
STRATEGY = "execution_context_allocation_strategy"
MULTI_DEVICE = "enable_multi_device"
POLICIES = ("BLOCKING", "DEVICE_BLOCKING")
BATCH_SIZE = "default-max-batch-size"
SETTINGS = ("coalesce-request-input", BATCH_SIZE, "execution-policy", "plugins", "version-compatible")
"""All `--backend-config` settings that are read here."""


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """The `--backend-config` settings. `default_max_batch_size` None: the engine's own.

    `notes` are settings without effect.
    """

    plugins: tuple[str, ...] = ()
    version_compatible: bool = False
    default_max_batch_size: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def opens_libraries(self) -> bool:
        """Whether engines bring or need native code, which is opened only in processes of their own."""
        return bool(self.plugins) or self.version_compatible


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """`strategy` is a name of TensorRT's ExecutionContextAllocationStrategy."""

    strategy: str = "STATIC"
    graphs: bool = False
    busy_wait: bool = False
    pinned_input: bool = True
    pinned_output: bool = True
    priority: ModelPriority = ModelPriority.PRIORITY_DEFAULT


def read_backend_options(settings: Mapping[str, str]) -> BackendOptions:
    """The options; INVALID_ARG names the first invalid one. Settings of other backends are ignored."""
    notes = []
    if _flag(settings, "coalesce-request-input"):
        notes.append("coalesce-request-input has no effect: the inputs of a batch are always joined before the copy")
    policy = settings.get("execution-policy", "")
    if policy and policy not in POLICIES:
        raise _wrong("execution-policy", policy, f"one of {', '.join(POLICIES)}")
    if policy == "DEVICE_BLOCKING":
        notes.append("execution-policy=DEVICE_BLOCKING has no effect: each instance has a thread, as with BLOCKING")
    return BackendOptions(
        tuple(path for path in settings.get("plugins", "").split(";") if path),
        _flag(settings, "version-compatible"),
        number_setting("tensorrt", settings, BATCH_SIZE, 0) if settings.get(BATCH_SIZE) else None,
        tuple(notes),
    )


def read_model_options(config: ModelConfig, model: str) -> ModelOptions:
    """The options in `config`; INVALID_ARG or UNSUPPORTED names the parameter."""
    parameters = parameters_of(config)
    if BOOLEANS.get(parameters.get(MULTI_DEVICE, "false").lower(), True):
        raise unsupported(
            f"model '{clip(model)}': parameter '{MULTI_DEVICE}' is not supported: an engine runs on one GPU; remove "
            "the parameter, or build one engine per GPU and join them in an ensemble"
        )
    strategy = parameters.get(STRATEGY, "") or "STATIC"
    if strategy not in STRATEGIES:
        raise invalid(
            f"model '{clip(model)}': parameter '{STRATEGY}' is '{clip(strategy)}'; "
            f"it must be one of {', '.join(STRATEGIES)}"
        )
    optimization = config.optimization
    if optimization is None:
        return ModelOptions(strategy)
    cuda = optimization.cuda
    pinned_input, pinned_output = optimization.input_pinned_memory, optimization.output_pinned_memory
    return ModelOptions(
        strategy,
        graphs=cuda is not None and cuda.graphs,
        busy_wait=cuda is not None and cuda.busy_wait_events,
        pinned_input=pinned_input is None or pinned_input.enable,
        pinned_output=pinned_output is None or pinned_output.enable,
        priority=optimization.priority,
    )


def _flag(settings: Mapping[str, str], key: str) -> bool:
    text = settings.get(key, "") or "false"
    if text.lower() not in BOOLEANS:
        raise _wrong(key, text, "true or false")
    return BOOLEANS[text.lower()]


def _wrong(key: str, text: str, expected: str) -> InferenceError:
    return invalid(f"--backend-config tensorrt,{key}={clip(text)}: it must be {expected}")
