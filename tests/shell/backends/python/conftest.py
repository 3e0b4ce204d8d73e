import sys

import pytest


@pytest.fixture(autouse=True)
def _no_model_stays_imported():
    """A worker process imports one model; here several follow each other."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in {
            "1",
            "model",
            "helper",
            "beside",
            "package",
            "shared",
            "triton_python_backend_utils",
        }:
            del sys.modules[name]
