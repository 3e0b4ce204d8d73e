"""Halimede serves trained models; a drop-in for Triton Inference Server."""

__version__ = "0.1.0"
