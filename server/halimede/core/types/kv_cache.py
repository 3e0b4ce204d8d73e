"""The usage of a language model's key-value cache, from its backend's metrics."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvCache:
    """Counts are in blocks; `tokens_per_block` is how many tokens each holds."""

    used_blocks: float
    max_blocks: float
    tokens_per_block: float

    @property
    def utilization(self) -> float:
        """From 0 to 1."""
        return self.used_blocks / self.max_blocks if self.max_blocks else 0.0

    @property
    def max_tokens(self) -> int:
        return int(self.max_blocks * self.tokens_per_block)
