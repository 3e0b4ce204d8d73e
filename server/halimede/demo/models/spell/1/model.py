"""Reads a number aloud: one answer for each of its digits."""

import numpy as np
import triton_python_backend_utils as pb_utils

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            (number,) = pb_utils.get_input_tensor_by_name(request, "number").as_numpy()
            sender = request.get_response_sender()
            for digit in number.decode():
                word = np.array([WORDS[int(digit)]], dtype=np.object_)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("word", word)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
