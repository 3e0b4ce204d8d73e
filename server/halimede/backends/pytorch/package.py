"""The signature of an AOTInductor package, from the C++ source that it carries beside its library. Pure.

The library checks its inputs only on request, and then refuses dynamic dimensions of size 1, which it computes. Without
a check it reads beyond a tensor whose size does not match another one's. So the backend makes the same checks itself,
by the sizes that the source names. If the source cannot be read, the library's own checks are switched on.
"""

import re
from dataclasses import dataclass

from halimede.backends.pytorch.exported import Dimension, ExportedTensor
from halimede.backends.pytorch.tree import argument_paths, result_paths
from halimede.core.types import DataType

_NAMES = {
    "uint8": DataType.UINT8,
    "int8": DataType.INT8,
    "int16": DataType.INT16,
    "int32": DataType.INT32,
    "int64": DataType.INT64,
    "float16": DataType.FP16,
    "float32": DataType.FP32,
    "float64": DataType.FP64,
    "bool": DataType.BOOL,
    "bfloat16": DataType.BF16,
    "uint16": DataType.UINT16,
    "uint32": DataType.UINT32,
    "uint64": DataType.UINT64,
}
"""Datatype by PyTorch's name."""

_INPUT = re.compile(r'inputs_info_\[(\d+)\]\.name = "(\w+)";')
_SPEC = re.compile(r'(in_spec_|out_spec_) = R"\((.*?)\)";')
_DTYPE = re.compile(r"(\w+)_expected_dtype = aoti_torch_dtype_(\w+)\(\);")
_MOST = re.compile(r"if \((\w+)_size\[(\d+)\] > (\d+)L?\)")
_LEAST = re.compile(r"if \((\w+)_size\[(\d+)\] < (\d+)L?\)")
_SIZES = re.compile(r'assert_size_stride\((\w+), \{([^{}]*)\}, \{[^{}]*\}, "input"\)')
_SYMBOL = re.compile(r"[su]\d+")
_NUMBER = re.compile(r"(\d+)L?")


@dataclass(frozen=True, slots=True)
class PackageSignature:
    """`inputs` None: the source does not say enough to check them. Results have names only."""

    inputs: tuple[ExportedTensor, ...] | None
    input_paths: tuple[str, ...]
    output_paths: tuple[str, ...]


def read_package(source: str) -> PackageSignature | None:
    """The signature in the source of the package's wrapper; None if not even the names can be read."""
    specs = dict(_SPEC.findall(source))
    try:
        input_paths, output_paths = argument_paths(specs["in_spec_"]), result_paths(specs["out_spec_"])
    except (KeyError, ValueError):
        return None
    names = [name for _, name in sorted((int(at), name) for at, name in _INPUT.findall(source))]
    if len(names) != len(input_paths):
        # Arguments that are no tensors are in the structure, but are not passed.
        return None
    return PackageSignature(_inputs(source, names, input_paths), input_paths, output_paths)


def _inputs(source: str, names: list[str], paths: tuple[str, ...]) -> tuple[ExportedTensor, ...] | None:
    datatypes = {name: _NAMES.get(datatype) for name, datatype in _DTYPE.findall(source)}
    sizes = {name: [each.strip() for each in text.split(",") if each.strip()] for name, text in _SIZES.findall(source)}
    most = {(name, int(at)): int(value) for name, at, value in _MOST.findall(source)}
    least = {(name, int(at)): int(value) for name, at, value in _LEAST.findall(source)}
    found: list[ExportedTensor] = []
    for name, path in zip(names, paths, strict=True):
        datatype, named = datatypes.get(name), sizes.get(name)
        if datatype is None or named is None:
            return None
        dimensions: list[Dimension] = []
        for at, text in enumerate(named):
            if number := _NUMBER.fullmatch(text):
                dimensions.append(Dimension(int(number[1])))
            elif _SYMBOL.fullmatch(text):
                low = least.get((name, at), 0)
                # PyTorch compiles dynamic sizes as if they were 2 at least, and computes 1 with the same code.
                dimensions.append(Dimension(-1, text, None if low <= 2 else low, most.get((name, at))))
            else:
                # A size that is computed from others: only the library can check it.
                return None
        found.append(ExportedTensor(path, datatype, tuple(dimensions)))
    return tuple(found)
