"""A process of a worker from start to end: its program, limits, readiness and restarts."""
