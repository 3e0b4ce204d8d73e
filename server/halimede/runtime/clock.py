"""The clocks. Core takes `now` as an argument; this is where it comes from."""

import time

monotonic_ns = time.monotonic_ns
"""Durations and deadlines: never jumps."""


def wall_ms() -> int:
    """Milliseconds since the epoch, for people and for `last_inference` alone."""
    return time.time_ns() // 1_000_000
