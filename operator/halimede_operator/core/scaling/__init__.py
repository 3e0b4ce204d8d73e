"""Decides how many replicas an object has, and who may change that number."""
