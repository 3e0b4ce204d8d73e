"""The clocks. The core takes `now` as an argument; the runtime reads it here."""

import time

monotonic_ns = time.monotonic_ns
"""Durations and deadlines: never jumps."""


def wall_ms() -> int:
    """Milliseconds since the epoch, for display and for `last_inference` only."""
    return time.time_ns() // 1_000_000
