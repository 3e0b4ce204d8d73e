"""The demo's stateful model: the mean forecast of a hospital ward's patients so far, with implicit state.

scikit-learn's diabetes data has ten measurements of each of 442 patients, and the progress of the disease after a year.
A linear regression forecasts the progress. The patients of a ward are one sequence: the ONNX model adds each forecast
to a sum and a count, which are its state, and answers with their mean. The server keeps the state of each sequence.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.demo.drive import CALLERS, REQUEST_TIMEOUT_S
from halimede.demo.export import Export

MODEL = "ward_mean"
WARDS, PATIENTS = 34, 13
"""Number of wards, and of patients in each."""
TOLERANCE = 1e-3
"""Tolerance for means of about 150 that were computed in batches of other sizes."""

CONFIG = f"""\
name: "{MODEL}"
backend: "onnxruntime"
max_batch_size: 16
input [ {{ name: "PATIENT" data_type: TYPE_FP32 dims: [ 10 ] }} ]
output [ {{ name: "MEAN" data_type: TYPE_FP32 dims: [ 1 ] }} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
sequence_batching {{
  oldest {{ max_candidate_sequences: 64 }}
  state [
    {{ input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_FP32 dims: [ 1 ]
      initial_state {{ name: "no patients" data_type: TYPE_FP32 dims: [ 1 ] zero_data: true }} }},
    {{ input_name: "COUNT_IN" output_name: "COUNT_OUT" data_type: TYPE_FP32 dims: [ 1 ]
      initial_state {{ name: "no patients" data_type: TYPE_FP32 dims: [ 1 ] zero_data: true }} }}
  ]
}}
"""


def measured_patients(export: Export) -> NDArray[np.float32]:
    """The measurements, [wards, patients, 10]."""
    patients: NDArray[np.float32] = np.load(export.folder / "patients.npy")
    return patients


def train(export: Export) -> None:
    """Train, and write the model and the patients."""
    # These imports take seconds, and a second run does not need them.
    from sklearn.datasets import load_diabetes  # type: ignore[import-untyped]  # no types there
    from sklearn.linear_model import Ridge  # type: ignore[import-untyped]  # no types there

    patients, progress = load_diabetes(return_X_y=True)
    regression = Ridge(alpha=0.1).fit(patients, progress)
    with export.written(CONFIG) as partial:
        partial.model.write_bytes(onnx_model(regression.coef_, regression.intercept_))
        np.save(partial.folder / "patients.npy", patients.astype(np.float32).reshape(WARDS, PATIENTS, 10))


def onnx_model(weights: NDArray[np.float64], bias: float) -> bytes:
    """The regression with these weights [10], and the running mean of its results."""
    from onnx import TensorProto, checker, helper, numpy_helper

    def rows(name: str, columns: int) -> Any:  # onnx has no type for it
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", columns])

    constants = {"WEIGHTS": weights.reshape(10, 1), "BIAS": np.array([bias]), "ONE": np.array([1.0])}
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["PATIENT", "WEIGHTS"], ["WEIGHTED"]),
            helper.make_node("Add", ["WEIGHTED", "BIAS"], ["FORECAST"]),
            helper.make_node("Add", ["SUM_IN", "FORECAST"], ["SUM_OUT"]),
            helper.make_node("Add", ["COUNT_IN", "ONE"], ["COUNT_OUT"]),
            helper.make_node("Div", ["SUM_OUT", "COUNT_OUT"], ["MEAN"]),
        ],
        MODEL,
        [rows("PATIENT", 10), rows("SUM_IN", 1), rows("COUNT_IN", 1)],
        [rows("MEAN", 1), rows("SUM_OUT", 1), rows("COUNT_OUT", 1)],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    checker.check_model(model)
    return bytes(model.SerializeToString())


def means_outside(export: Export, patients: NDArray[np.float32]) -> NDArray[np.float32]:
    """The means [wards, patients] from ONNX Runtime in this process, one ward after the other."""
    import onnxruntime  # type: ignore[import-untyped]  # no types there

    session = onnxruntime.InferenceSession(export.model, providers=["CPUExecutionProvider"])
    means = np.empty(patients.shape[:2], np.float32)
    for ward, rows in enumerate(patients):
        total = count = np.zeros((1, 1), np.float32)
        for at, patient in enumerate(rows):
            mean, total, count = session.run(
                ["MEAN", "SUM_OUT", "COUNT_OUT"], {"PATIENT": patient[None], "SUM_IN": total, "COUNT_IN": count}
            )
            means[ward, at] = mean[0, 0]
    return means


def means_of_wards(address: str, patients: NDArray[np.float32]) -> NDArray[np.float32]:
    """The means [wards, patients] from the server, over HTTP.

    Each of the CALLERS has some wards, and sends the next patient of each of them in turn: the sequences of all wards
    are open at the same time.
    """
    means = np.empty(patients.shape[:2], np.float32)

    def send(wards: range) -> None:
        import tritonclient.http as client  # type: ignore[import-untyped]  # no types there

        with closing(client.InferenceServerClient(address, network_timeout=REQUEST_TIMEOUT_S)) as server:
            for at in range(patients.shape[1]):
                for ward in wards:
                    tensor = client.InferInput("PATIENT", [1, 10], "FP32")
                    tensor.set_data_from_numpy(patients[ward, at][None])
                    result = server.infer(
                        MODEL,
                        [tensor],
                        sequence_id=ward + 1,
                        sequence_start=at == 0,
                        sequence_end=at == patients.shape[1] - 1,
                    )
                    means[ward, at] = result.as_numpy("MEAN")[0, 0]

    with ThreadPoolExecutor(CALLERS) as pool:
        for done in [pool.submit(send, range(caller, len(patients), CALLERS)) for caller in range(CALLERS)]:
            done.result()
    return means
