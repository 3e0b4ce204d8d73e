"""Requests to the API server: credentials, safe decoding, and errors. The operator and the metrics API use it."""
