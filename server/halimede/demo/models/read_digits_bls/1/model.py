"""Reads digits as the ensemble `read_digits` does, by calling the same three models from Python."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        try:
            file = pb_utils.get_input_tensor_by_name(request, "FILE")
            (image,) = call("digit_pixels", [file], ["IMAGE"])
            (probabilities,) = call("digits", [renamed(image, "image")], ["probabilities"])
            answer = call("digit_words", [renamed(probabilities, "PROBABILITIES")], ["WORD", "CONFIDENCE"])
        except pb_utils.TritonModelException as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        return pb_utils.InferenceResponse(answer)


def call(model, inputs, outputs):
    response = pb_utils.InferenceRequest(model_name=model, inputs=inputs, requested_output_names=outputs).exec()
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return [pb_utils.get_output_tensor_by_name(response, name) for name in outputs]


def renamed(tensor, name):
    return pb_utils.Tensor(name, tensor.as_numpy())
