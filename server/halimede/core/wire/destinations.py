"""The destinations of a response's outputs, as requested.

Both codecs make these values from a request, and both encoders of responses read them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from halimede.core.types import RegionSlice


@dataclass(frozen=True, slots=True)
class Inline:
    """In the response itself.

    `binary` is the choice between binary data and JSON; over gRPC every output is binary. `classes` is the number of
    best classes to send instead of the tensor, 0 for the tensor.
    """

    binary: bool
    classes: int = 0


Destination = Inline | RegionSlice
"""The destination of one output: the response, or a client's shared memory."""

JSON = Inline(binary=False)
BINARY = Inline(binary=True)


@dataclass(slots=True)
class Destinations:
    """The destination of each output: that in `outputs` if its name is there, else `default`."""

    default: Inline = JSON
    outputs: Mapping[str, Inline] = field(default_factory=dict)

    def of(self, name: str) -> Inline:
        """The destination of this output."""
        return self.outputs.get(name, self.default)


ALL_JSON = Destinations()
"""Every output as JSON."""

ALL_BINARY = Destinations(BINARY)
"""Every output as binary data."""
