"""What a model version needs to run in worker processes: the program, and the spec of each instance."""

import os
from dataclasses import dataclass

from halimede.backends.api import Backend, ModelSource
from halimede.backends.hosting import WorkerSpec
from halimede.backends.python.backend import PythonBackend
from halimede.backends.python.environment import Environment
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.write import to_json
from halimede.core.types import Placement
from halimede.workers.supervision.program import Program

PYTHON_MODELS = "halimede.backends.python.runner:make_runner"
ANY_BACKEND = "halimede.workers.host.backend_runner:make_runner"

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Isolated:
    """A version whose instances are processes; `config` is the complete configuration."""

    config: ModelConfig
    source: ModelSource
    runner: str
    program: Program
    threads: int
    log_verbose: int
    environment: Environment | None = None

    def close(self) -> None:
        """Free the environment. Called once, after the last process has ended."""
        if self.environment is not None:
            self.environment.close()

    def spec(self, placement: Placement) -> WorkerSpec:
        """The spec of this instance's process."""
        config, source, device = self.config, self.source, placement.device
        return WorkerSpec(
            model=source.name,
            version=source.version,
            instance=placement.name,
            ordinal=placement.ordinal,
            kind=placement.kind,
            # The process sees only this device, as number 0.
            device_id=0,
            device_uuid=device.uuid if device is not None else "",
            backend=config.backend,
            runner=self.runner,
            config_json=to_json(config).decode(),
            repository=str(source.model_directory),
            artifact=str(source.artifact_on(device)),
            options=source.options,
            threads=self.threads,
            decoupled=config.is_decoupled,
            log_verbose=self.log_verbose,
            allow_pickle=source.allow_pickle,
        )


def thread_variables(threads: int, *, asked_for: bool) -> dict[str, str]:
    """The environment variables that limit the threads of numeric libraries. Variables that are set for the server take
    precedence, except over a number that the model `asked_for`."""
    return {name: str(threads) for name in _THREAD_VARIABLES if asked_for or name not in os.environ}


def runner_of(backend: Backend) -> str:
    """The entry point of the runner that executes the backend's models in a worker process."""
    return PYTHON_MODELS if isinstance(backend, PythonBackend) else ANY_BACKEND
