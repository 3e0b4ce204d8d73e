"""Models of TensorFlow, which are built once and kept between runs, in a repository."""

import os
import shutil
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from support.image import install_programs
from support.models import write_config
from support.probe import built
from support.served import parameter

ROWS = np.random.default_rng(7).standard_normal((5, 16)).astype(np.float32)
LIBRARY = "libhalf.so"
ONE = "instance_group { kind: KIND_CPU count: 1 }\n" + parameter("TF_NUM_INTRA_THREADS", "1")


def built_models() -> Path:
    """The folder of `probes/tensorflow`: SavedModels, graphs, TensorFlow's own answers (NAME.npy) and LIBRARY."""
    install_programs({"c++": "build-essential"})
    package = find_spec("tensorflow").submodule_search_locations[0]  # type: ignore[union-attr,index]  # installed
    # By arguments, because the places of this environment are no part of what is built.
    compile_ = f"c++ -shared -fPIC -O1 -Wall -I$0/include -o {{out}}/{LIBRARY} operation.cc -L$0"
    command = f"{compile_} -l:libtensorflow_framework.so.2 && $1 models.py {{out}} {{out}}/{LIBRARY}"
    versioned = f"{command} # {version('tensorflow_cpu')}"
    return built("tensorflow", ["sh", "-c", versioned], needs="c++", places=[package, sys.executable])


def add_model(repository: Path, name: str, built_name: str, config: str = ONE) -> Path:
    """Put one of the built models into the repository; returns its file or directory."""
    source = built_models() / built_name
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    if source.is_dir():
        target = folder / "model.savedmodel"
        shutil.copytree(source, target)
    else:
        target = folder / f"model{os.path.splitext(built_name)[1]}"
        shutil.copy(source, target)
    write_config(repository / name, config)
    return target


def expected(output: str) -> np.ndarray:
    """What TensorFlow answered for ROWS."""
    return np.load(built_models() / f"{output}.npy")
