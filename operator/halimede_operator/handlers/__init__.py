"""Inputs of the operator: watch events through kopf, probes and metrics over HTTP."""
