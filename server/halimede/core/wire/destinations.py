"""How the outputs of a response travel."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How one output travels. `classes` is the number of classes wanted, 0 for the tensor itself."""

    binary: bool
    classes: int = 0


JSON = OutputFormat(binary=False)
BINARY = OutputFormat(binary=True)


@dataclass(slots=True)
class ResponseFormat:
    """How the outputs of a response travel: `outputs` for those that the request named, `default` for the others."""

    default: OutputFormat = JSON
    outputs: Mapping[str, OutputFormat] = field(default_factory=dict)

    def of(self, name: str) -> OutputFormat:
        """The format of this output."""
        return self.outputs.get(name, self.default)


ALL_JSON = ResponseFormat()
"""Every output as JSON."""

ALL_BINARY = ResponseFormat(BINARY)
