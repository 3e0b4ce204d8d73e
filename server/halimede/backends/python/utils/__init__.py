"""The module `triton_python_backend_utils` for models; `module` assembles and registers it."""
