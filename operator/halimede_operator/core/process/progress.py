"""Whether the process makes progress, which its liveness is about.

Two threads report: one that does nothing else (`ticked`), and the event loop of all work (`stepped`). A loop without a
step hangs if the other thread ran all that time. If the process gets too little CPU, or is stopped for a while, neither
runs, and a restart would not help: time in which the ticks were late is not counted.
"""

TICK_S = 1.0
"""How often to report."""
LONGEST_TICK_S = 2 * TICK_S
HANGS_AFTER_S = 60.0
STARVED_S = 5.0
"""If the loop makes no step for longer, its watches may have received nothing for this reason alone."""


class Progress:
    """Times are monotonic seconds. Each method is called by one thread; every write is one assignment."""

    def __init__(self, now: float) -> None:
        self._ticked_at = now
        self._awake_s = 0.0
        """How long the process ran, without the time in which it was starved."""
        self._stepped_at_s = 0.0
        """`_awake_s` at the last step."""
        self._stepped_at = now

    def ticked(self, now: float) -> None:
        self._awake_s += min(now - self._ticked_at, LONGEST_TICK_S)
        self._ticked_at = now

    def stepped(self, now: float) -> bool:
        """Return whether it is the first step after a time in which the loop did not run."""
        was_starved = now - self._stepped_at > STARVED_S
        self._stepped_at, self._stepped_at_s = now, self._awake_s
        return was_starved

    def problem(self) -> str | None:
        """Why the process is not alive; None if it is."""
        without_s = self._awake_s - self._stepped_at_s
        return f"the event loop has hung for {without_s:.0f} s" if without_s > HANGS_AFTER_S else None
