"""Access to the API server and to the pods: calls, the cache that watches fill, events."""
