"""The settings of the processes of one model version."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from halimede.core.restarts import FIRST_RETRY_NS


@dataclass(frozen=True, slots=True)
class Program:
    """The settings of the processes of one model version.

    `python` is the model's own interpreter, "" for the server's. `environment` overrides the server's. `preload`: see
    `backends.api.Preloads`, "" for nothing. `spins`: see `core.spin`. `first_retry_ns`: see `core.restarts`.
    """

    python: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    max_concurrency: int = 1
    execution_timeout_ms: int = 0
    bls_timeout_ms: int = 0
    spins: bool = True
    preload: str = ""
    first_retry_ns: int = FIRST_RETRY_NS
