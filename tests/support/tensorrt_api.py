"""The interface of the real TensorRT, read from its Python package, whose import otherwise needs NVIDIA's libraries.

The package `tensorrt-cu13-bindings` is one extension module, and has the name, the arguments and the types of each
function in its docstring. It needs three libraries for nine functions. Here these are empty libraries, compiled on the
spot: that is enough to import the module and to read the docstrings, and to call nothing.

`python tests/support/tensorrt_api.py` writes the list that `tests/conformance/test_tensorrt_api.py` compares.
"""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support.image import Unavailable, install_programs
from support.phases import only_one
from support.probe import cache

LIST = Path(__file__).parent / "played_gpu" / "api.txt"
NEWEST = ("tensorrt-cu13-bindings", "11.4.0.106")
OLDEST = ("tensorrt-cu12-bindings", "10.0.1")

LIBRARIES = ("libnvinfer", "libnvinfer_plugin", "libnvonnxparser")
FUNCTIONS = (
    *("createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL"),
    *("createNvOnnxParserRefitter_INTERNAL", "createNvOnnxParser_INTERNAL", "getBuilderPluginRegistry"),
    *("getNvOnnxParserVersion", "getPluginRegistry", "initLibNvInferPlugins", "getInferLibVersion"),
    *("getInferLibMajorVersion", "getInferLibMinorVersion", "getInferLibPatchVersion", "getInferLibBuildVersion"),
)

READ = '''
import re, sys
sys.path.insert(0, sys.argv[1])
import tensorrt_bindings as trt

def lines(name, found):
    """One line per overload of a function; the type of a property."""
    if isinstance(found, property):
        return [name]
    text = found.__doc__ or ""
    return [f"{name}{each}" for each in re.findall(r"^(?:\\d+\\. )?\\w+(\\(.*\\) -> .*)$", text, re.M)]

for name in sys.argv[2].split():
    owner, _, member = name.rpartition(".")
    holder = getattr(trt, owner) if owner else trt
    found = vars(holder).get(member)
    if hasattr(found, "__members__"):
        print(f"{name}: {' '.join(found.__members__)}")
    elif found is not None:
        print("\\n".join(lines(name, found) or [name]))
'''


def names() -> list[str]:
    """The functions, properties and enums that the played TensorRT has, as the list names them."""
    return list(dict.fromkeys(re.match(r"[\w.]+", line)[0] for line in LIST.read_text().splitlines()))  # type: ignore[index]


def described(package: str, version: str, wanted: list[str]) -> list[str]:
    """The lines of the list for these names. Unavailable where the package cannot be downloaded or imported."""
    folder = bindings(package, version)
    done = subprocess.run(
        [sys.executable, "-c", READ, str(folder), " ".join(wanted)],
        env={"LD_LIBRARY_PATH": str(folder / "empty")},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Unavailable(f"{package} {version} cannot be imported: {done.stderr[-2000:]}")
    return [_plain(line) for line in done.stdout.splitlines()]


def _plain(line: str) -> str:
    """The line without what differs between versions of the tool that writes the docstrings."""
    for pattern, text in (
        (r"\b(?:tensorrt_bindings\.)?tensorrt\.(?=\w)", ""),
        (r"\bnvinfer1::", ""),
        (r"\b(?:typing|typing_extensions|collections\.abc|capsule)\.", ""),
        (r"\bSupportsInt\b", "int"),
        (r"\bBuffer\b", "buffer"),
        (r"\bList\b", "list"),
        (r"\bCapsuleType\b", "capsule"),
        (r"self: \w+(, )?", ""),
    ):
        line = re.sub(pattern, text, line)
    return line


def bindings(package: str, version: str) -> Path:
    """The unpacked package, with the empty libraries in its folder `empty`."""
    folder = cache() / f"{package}-{version}-{sys.version_info.major}{sys.version_info.minor}"
    with only_one(cache() / f"{package}.lock", package):
        if folder.exists():
            return folder
        install_programs({"cc": "build-essential"})
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "empty").mkdir(parents=True)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        _run([*download, "--dest", str(partial), f"{package}=={version}"], package)
        (wheel,) = partial.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial)
        source = partial / "empty.c"
        source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in FUNCTIONS))
        for library in LIBRARIES:
            target = partial / "empty" / f"{library}.so.{version.partition('.')[0]}"
            _run(["cc", "-shared", "-fPIC", "-w", "-o", str(target), str(source)], library)
        partial.rename(folder)
    return folder


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{what} cannot be had: {(done.stdout + done.stderr)[-2000:]}")


if __name__ == "__main__":
    LIST.write_text("\n".join(described(*NEWEST, names())) + "\n")
