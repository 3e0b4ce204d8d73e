"""How the processes of one model version are run."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Program:
    """How the processes of one model version are run.

    `python` is an interpreter of the model's own, "" for the server's. `environment` is set over the server's. `spins`:
    see `core.spin`.
    """

    python: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    max_concurrency: int = 1
    execution_timeout_ms: int = 0
    bls_timeout_ms: int = 0
    spins: bool = True
