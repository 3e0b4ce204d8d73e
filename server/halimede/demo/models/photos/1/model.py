"""Decodes JPEG files and resizes them to what image models are used to: 224 by 224 pixels of red, green and blue."""

import cv2
import numpy as np
import triton_python_backend_utils as pb_utils

SIZE = (224, 224)


class TritonPythonModel:
    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        files = pb_utils.get_input_tensor_by_name(request, "JPEG").as_numpy()
        pixels = np.empty((len(files), *SIZE, 3), np.uint8)
        for row, file in enumerate(files.ravel()):
            photo = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR_RGB) if file else None
            if photo is None:
                error = pb_utils.TritonError(f"row {row} of 'JPEG' is no image", pb_utils.TritonError.INVALID_ARG)
                return pb_utils.InferenceResponse(error=error)
            cv2.resize(photo, SIZE, dst=pixels[row], interpolation=cv2.INTER_AREA)
        return pb_utils.InferenceResponse([pb_utils.Tensor("PIXELS", pixels)])
