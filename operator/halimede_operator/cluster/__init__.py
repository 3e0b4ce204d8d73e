"""The API server and the pods: calls, what watches told, events."""
