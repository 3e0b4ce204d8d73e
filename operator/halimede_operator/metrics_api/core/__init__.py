"""The custom metrics API: rules, queries, callers and answers. No I/O."""
