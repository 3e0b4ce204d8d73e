"""Revisions of an object's pods: what was applied, how it went, and what was rolled back."""
