"""What `kubectl describe` shows of a healthy model or ensemble, as a person reads it."""

MOST_LINES = 60
"""Below the spec: of status and events together."""


def check_is_short(described: str) -> None:
    """The status and the events have at most 60 lines, and Ready is the first condition."""
    lines = described[described.index("\nStatus:\n") + 1 :].splitlines()
    assert len(lines) <= MOST_LINES, described
    types = [line.split()[1] for line in lines if line.startswith("    Type: ")]
    assert types[0] == "Ready", described
    assert "Events:" in lines
    assert lines[-1].startswith("  Normal"), described
