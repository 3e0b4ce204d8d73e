"""What models import as `triton_python_backend_utils`; `module` puts it together and registers it."""
