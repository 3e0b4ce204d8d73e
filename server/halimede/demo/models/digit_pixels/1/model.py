"""Decodes pictures, PNG or JPEG, to what the classifier of digits was trained on: 8 by 8 brightnesses from 0 to 16."""

import cv2
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        files = pb_utils.get_input_tensor_by_name(request, "FILE").as_numpy()
        images = np.empty((len(files), 64), np.float32)
        for row, file in enumerate(files.ravel()):
            picture = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_GRAYSCALE) if file else None
            if picture is None:
                error = pb_utils.TritonError(f"row {row} of 'FILE' is no image", pb_utils.TritonError.INVALID_ARG)
                return pb_utils.InferenceResponse(error=error)
            small = cv2.resize(picture, (8, 8), interpolation=cv2.INTER_AREA)
            images[row] = small.ravel() * np.float32(16 / 255)
        return pb_utils.InferenceResponse([pb_utils.Tensor("IMAGE", images)])
