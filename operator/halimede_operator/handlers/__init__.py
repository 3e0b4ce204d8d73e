"""Inputs of the operator: watch events through kopf."""
