"""Pipelines: what an ensemble's configuration must keep, and the way of one request through its steps."""
