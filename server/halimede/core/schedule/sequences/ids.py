"""The texts that identify sequences, which the server keeps as long as it knows the sequence."""

from dataclasses import dataclass

from halimede.core.sequences.rows import StateBytes
from halimede.core.types.error import clip, invalid, unavailable

DEFAULT_MAX_ID_BYTES = 4096


@dataclass(frozen=True, slots=True)
class SequenceIds:
    """`held` counts the texts of all models, together with the states of sequences. `max_bytes` is for one text."""

    held: StateBytes
    max_bytes: int = DEFAULT_MAX_ID_BYTES

    def take(self, correlation: int | str, model: str) -> int:
        """Count the id of a new sequence. Returns its bytes, which are to be given back to `held`; 0 for a number.

        INVALID_ARG if it is too long, UNAVAILABLE if all together would exceed the bound.
        """
        if not isinstance(correlation, str):
            return 0
        size = len(correlation.encode("utf-8", "replace"))
        if size > self.max_bytes:
            raise invalid(
                f"the sequence_id of an inference request to model '{clip(model)}' has {size} bytes, at most "
                f"{self.max_bytes} are accepted. Use --max-sequence-id-size to increase the limit."
            )
        if not self.held.try_take(size):
            text = f"inference request to model '{clip(model)}': the server has no memory left for another sequence"
            raise unavailable(text)
        return size
