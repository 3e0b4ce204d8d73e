"""What is imported before worker processes are forked must not open CUDA: a fork could not use it any more."""

import os
import subprocess
import sys

import pytest

from halimede.backends.pytorch.runtime import has_gpu_build
from support.played_driver import cuda_library
from support.probe import provided

START = "the CUDA runtime starts"
CODE = """
import sys, warnings
from halimede.backends.pytorch.runtime import export_runtime, runtime
export_runtime()
print("all is imported", file=sys.stderr, flush=True)
warnings.simplefilter("ignore")
runtime().cuda.is_available()
"""


@pytest.mark.large
@pytest.mark.skipif(not has_gpu_build(), reason="the PyTorch here has no CUDA")
def test_the_import_of_pytorch_does_not_open_cuda(request: pytest.FixtureRequest) -> None:
    library = provided(request.config, cuda_library)
    environment = os.environ | {"LD_LIBRARY_PATH": str(library.parent)}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["all is imported", START]
