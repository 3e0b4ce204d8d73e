"""What comes in: watch events by kopf, probes and metrics over HTTP."""
