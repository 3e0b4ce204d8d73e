"""How many threads the session of an instance gets. Pure."""

from dataclasses import dataclass

from halimede.backends.tensorflow.options import TensorFlowOptions
from halimede.core.config.instances import instance_count
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.process_options import intra_op_threads


@dataclass(frozen=True, slots=True)
class SessionThreads:
    """Threads within an operation, and operations at a time."""

    intra: int
    inter: int

    @property
    def runs_in_caller(self) -> bool:
        """Whether the thread that calls computes, without a change of threads: possible for one operation at a time."""
        return self.inter == 1


def plan_threads(config: ModelConfig, options: TensorFlowOptions, cores: int) -> SessionThreads:
    """Threads for one instance of the model on a machine with `cores`.

    By default the instances share the cores, and each computes one operation at a time: a change of threads costs
    100 us a call, and few models have operations that are worth computing side by side.
    """
    share = intra_op_threads(config, cores, instance_count(config))
    return SessionThreads(options.intra_threads or share, options.inter_threads or 1)
