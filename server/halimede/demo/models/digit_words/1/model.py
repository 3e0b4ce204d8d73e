"""Says in a word which digit is the likeliest, and how likely it is."""

import numpy as np
import triton_python_backend_utils as pb_utils

WORDS = np.array(
    [b"zero", b"one", b"two", b"three", b"four", b"five", b"six", b"seven", b"eight", b"nine"], dtype=np.object_
)


class TritonPythonModel:
    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        probabilities = pb_utils.get_input_tensor_by_name(request, "PROBABILITIES").as_numpy()
        words = WORDS[probabilities.argmax(axis=1)].reshape(-1, 1)
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("WORD", words),
                pb_utils.Tensor("CONFIDENCE", probabilities.max(axis=1, keepdims=True)),
            ]
        )
