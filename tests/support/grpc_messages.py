"""Requests and answers of gRPC as messages."""

import struct

import numpy as np
from tritonclient.grpc import service_pb2 as pb


def message(model: str, request_id: str = "", columns: int = 16, value: float = 1) -> pb.ModelInferRequest:
    raw = struct.pack("<f", value) * columns
    made = pb.ModelInferRequest(model_name=model, id=request_id, raw_input_contents=[raw])
    made.inputs.add(name="IN", datatype="FP32", shape=[1, columns])
    return made


def values(answer: pb.ModelInferResponse) -> list[float]:
    return np.frombuffer(answer.raw_output_contents[0], "<f4").tolist()
