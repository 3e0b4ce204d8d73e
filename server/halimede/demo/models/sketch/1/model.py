"""Shrinks a photograph to so many columns and sends it row by row, each as an answer of its own."""

import cv2
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for row in shrunk(request):
                if sender.is_cancelled():
                    break
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("ROW", row)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def shrunk(request):
    (file,) = pb_utils.get_input_tensor_by_name(request, "JPEG").as_numpy()
    (columns,) = pb_utils.get_input_tensor_by_name(request, "COLUMNS").as_numpy()
    photo = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR_RGB)
    height, width, _ = photo.shape
    # A row is drawn as a line of characters, which are twice as high as they are wide.
    rows = max(1, round(columns * height / width / 2))
    return cv2.resize(photo, (int(columns), rows), interpolation=cv2.INTER_AREA)
