"""Ensembles: the rules for their configurations, and the execution of one request through the steps."""
