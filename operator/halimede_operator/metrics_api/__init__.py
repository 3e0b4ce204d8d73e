"""`halimede-operator metrics-api`: serves custom.metrics.k8s.io out of Prometheus."""
