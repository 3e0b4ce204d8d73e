"""ONNX models for batches of unequal requests. Each also outputs what it saw of its batch."""

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from support.models import ONE, save_onnx, write_config

PROCESS = 'parameters { key: "ISOLATION" value { string_value: "process" } }'


def together(requests: int) -> str:
    """Configuration text of a model that runs when exactly this number of requests with one row has come."""
    return f"{ONE} dynamic_batching {{ preferred_batch_size: {requests} max_queue_delay_microseconds: 60000000 }}"


def _constant(name: str, datatype: int, values: list) -> TensorProto:  # type: ignore[type-arg]
    shape = [len(values)]
    return helper.make_tensor(name, datatype, shape, np.array(values))


ONE_INDEX = _constant("one", TensorProto.INT64, [1])

RAGGED = """
backend: "onnxruntime"
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
output { name: "SUM" data_type: TYPE_FP32 dims: 1 }
output { name: "DOUBLED" data_type: TYPE_FP32 dims: -1 }
output { name: "SEEN" data_type: TYPE_FP32 dims: 4 }
batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO target_name: "EDGES" data_type: TYPE_INT32 source_input: "IN" }
batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ENDS" data_type: TYPE_INT32 source_input: "IN" }
batch_input { kind: BATCH_ELEMENT_COUNT target_name: "COUNTS" data_type: TYPE_FP32 source_input: "IN" }
batch_input { kind: BATCH_MAX_ELEMENT_COUNT_AS_SHAPE target_name: "LONGEST" data_type: TYPE_FP32 source_input: "IN" }
batch_input { kind: BATCH_ITEM_SHAPE target_name: "SHAPES" data_type: TYPE_FP32 source_input: "IN" }
batch_input { kind: BATCH_ITEM_SHAPE_FLATTEN target_name: "SIZES" data_type: TYPE_INT32 source_input: "IN" }
batch_output { target_name: "DOUBLED" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "IN" }
"""


def add_ragged(repository: Path, name: str, extra: str = "") -> None:
    """SUM of each request's elements, DOUBLED elements, and SEEN: counts, longest, shapes and flat shapes."""
    node = helper.make_node
    save_onnx(
        repository / name / "1" / "model.onnx",
        [
            node("CumSum", ["IN", "zero_axis"], ["sums"]),
            node("Concat", ["zero", "sums"], ["edge_sums"], axis=0),
            node("Slice", ["EDGES", "first", "last"], ["starts"]),
            node("Gather", ["edge_sums", "starts"], ["sums_before"]),
            node("Gather", ["edge_sums", "ENDS"], ["sums_after"]),
            node("Sub", ["sums_after", "sums_before"], ["flat_sum"]),
            node("Unsqueeze", ["flat_sum", "one"], ["SUM"]),
            node("Add", ["IN", "IN"], ["DOUBLED"]),
            node("Shape", ["LONGEST"], ["longest_shape"]),
            node("Cast", ["longest_shape"], ["longest"], to=TensorProto.FLOAT),
            node("Shape", ["COUNTS"], ["count"]),
            node("Expand", ["longest", "count"], ["longests"]),
            node("Cast", ["SIZES"], ["sizes"], to=TensorProto.FLOAT),
            *(node("Unsqueeze", [each, "one"], [f"{each}_row"]) for each in ("COUNTS", "longests", "sizes")),
            node("Concat", ["COUNTS_row", "longests_row", "SHAPES", "sizes_row"], ["SEEN"], axis=1),
        ],
        [
            ("IN", "FP32", ["elements"]),
            ("EDGES", "INT32", ["edges"]),
            ("ENDS", "INT32", ["N"]),
            ("COUNTS", "FP32", ["N"]),
            ("LONGEST", "FP32", ["longest"]),
            ("SHAPES", "FP32", ["N", 1]),
            ("SIZES", "INT32", ["N"]),
        ],
        [("SUM", "FP32", ["N", 1]), ("DOUBLED", "FP32", ["elements"]), ("SEEN", "FP32", ["N", 4])],
        [
            ONE_INDEX,
            helper.make_tensor("zero_axis", TensorProto.INT64, [], np.array([0])),
            _constant("zero", TensorProto.FLOAT, [0.0]),
            _constant("first", TensorProto.INT64, [0]),
            _constant("last", TensorProto.INT64, [-1]),
        ],
    )
    write_config(repository / name, f'name: "{name}" {RAGGED} {extra}')


PADDING = r"""[
  {\"input\": \"IDS\", \"axis\": 1, \"value\": -7, \"buckets\": [4, 8, 16], \"lengths\": \"LENGTHS\", \"outputs\": {\"SCORES\": 1}},
  {\"input\": \"MASK\", \"axis\": 1, \"buckets\": [4, 8, 16]}
]""".replace("\n", "")

PADDED = f"""
backend: "onnxruntime"
max_batch_size: 8
input {{ name: "IDS" data_type: TYPE_INT64 dims: -1 }}
input {{ name: "MASK" data_type: TYPE_FP32 dims: -1 }}
output {{ name: "SCORES" data_type: TYPE_FP32 dims: -1 }}
output {{ name: "MEAN" data_type: TYPE_FP32 dims: 1 }}
output {{ name: "SEEN" data_type: TYPE_FP32 dims: 2 }}
parameters {{ key: "PADDING" value {{ string_value: "{PADDING}" }} }}
"""


def add_padded(repository: Path, name: str, extra: str = "", lengths: str = "INT64", config: str = PADDED) -> None:
    """SCORES: masked ids, twice; MEAN: their sum by their true number; SEEN: the true and the padded length."""
    node = helper.make_node
    save_onnx(
        repository / name / "1" / "model.onnx",
        [
            node("Cast", ["IDS"], ["ids"], to=TensorProto.FLOAT),
            node("Mul", ["ids", "MASK"], ["masked"]),
            node("Add", ["masked", "masked"], ["SCORES"]),
            node("ReduceSum", ["SCORES", "one"], ["total"], keepdims=1),
            node("Cast", ["LENGTHS"], ["own"], to=TensorProto.FLOAT),
            node("Unsqueeze", ["own", "one"], ["own_row"]),
            node("Div", ["total", "own_row"], ["MEAN"]),
            node("Shape", ["IDS"], ["length"], start=1, end=2),
            node("Cast", ["length"], ["seen"], to=TensorProto.FLOAT),
            node("Shape", ["own_row"], ["column"]),
            node("Expand", ["seen", "column"], ["seen_row"]),
            node("Concat", ["own_row", "seen_row"], ["SEEN"], axis=1),
        ],
        [("IDS", "INT64", ["N", "L"]), ("MASK", "FP32", ["N", "L"]), ("LENGTHS", lengths, ["N"])],
        [("SCORES", "FP32", ["N", "L"]), ("MEAN", "FP32", ["N", 1]), ("SEEN", "FP32", ["N", 2])],
        [ONE_INDEX],
    )
    write_config(repository / name, f'name: "{name}" {config} {extra}')


SIZED = """
backend: "onnxruntime"
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: 2 }
output { name: "DOUBLED" data_type: TYPE_FP32 dims: 2 }
output { name: "SEEN" data_type: TYPE_INT64 dims: 1 }
parameters { key: "BATCH_SIZES" value { string_value: "2, 4, 8" } }
"""


def add_sized(repository: Path, name: str, extra: str = "") -> None:
    """DOUBLED elements, and SEEN: the number of rows."""
    node = helper.make_node
    save_onnx(
        repository / name / "1" / "model.onnx",
        [
            node("Add", ["IN", "IN"], ["DOUBLED"]),
            node("Shape", ["IN"], ["rows"], start=0, end=1),
            node("Concat", ["rows", "one"], ["column"], axis=0),
            node("Expand", ["rows", "column"], ["SEEN"]),
        ],
        [("IN", "FP32", ["N", 2])],
        [("DOUBLED", "FP32", ["N", 2]), ("SEEN", "INT64", ["N", 1])],
        [ONE_INDEX],
    )
    write_config(repository / name, f'name: "{name}" {SIZED} {extra}')
