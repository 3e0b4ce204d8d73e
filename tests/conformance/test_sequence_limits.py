"""The memory that sequences may take: their implicit states, and their ids."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from support.served import add_python

# The new state has as many elements as IN says.
GROW = """
answers = []
for request in requests:
    array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
    state = np.zeros((1, int(array[0, 0])), np.float32)
    answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array), pb_utils.Tensor("NEW", state)]))
return answers
"""
BATCHING = """
sequence_batching {
    oldest { max_candidate_sequences: 4 }
    max_sequence_idle_microseconds: 60000000
    state { input_name: "OLD" output_name: "NEW" data_type: TYPE_FP32 dims: [ -1 ] }
}
"""
Start = Callable[..., object]


def grown(client: object, tensor: object, sequence: int | str, elements: int, *, start: bool = False) -> str:
    """Let the state of a sequence get so many elements. Returns the status and the error, "" for none."""
    tensor.set_data_from_numpy(np.array([[elements]], np.float32))
    try:
        client.infer("grow", [tensor], sequence_id=sequence, sequence_start=start)
    except InferenceServerException as error:
        return f"{error.status()} {error.message()}"
    return ""


def test_states_and_ids_have_bounds_over_both_protocols(repository: Path, start: Start) -> None:
    add_python(repository, "grow", GROW, dims="1", extra=BATCHING)
    limits = ["--max-sequence-state-size=1000000", "--max-sequence-id-size=8"]
    server = start("--model-repository", repository, *limits)
    with (
        httpclient.InferenceServerClient(server.http_url.removeprefix("http://")) as http,
        grpcclient.InferenceServerClient(server.grpc_url) as grpc,
    ):
        for client, module, busy, invalid in (
            (http, httpclient, "503", "400"),
            (grpc, grpcclient, "StatusCode.UNAVAILABLE", "StatusCode.INVALID_ARGUMENT"),
        ):
            tensor = module.InferInput("IN", [1, 1], "FP32")
            assert grown(client, tensor, "a" * 8, 1, start=True) == ""
            text = "the sequence_id of an inference request to model 'grow' has 9 bytes, at most 8 are accepted. Use "
            assert grown(client, tensor, "a" * 9, 1, start=True) == (
                f"{invalid} {text}--max-sequence-id-size to increase the limit."
            )
            assert grown(client, tensor, 7, 1, start=True) == ""
            errors = (grown(client, tensor, 7, 2**power) for power in itertools.count(1))
            error = next(error for error in errors if error)
            assert error == (
                f"{busy} sequence 7 for model 'grow' has ended: its new state of 1048576 bytes would exceed the memory "
                "that the server has for the states of sequences; begin the sequence again with the START flag"
            )
            assert grown(client, tensor, 7, 1) == (
                f"{invalid} inference request for sequence 7 to model 'grow' must specify the START flag on the first "
                "request of the sequence"
            )
            assert grown(client, tensor, "a" * 8, 1) == ""
            assert grown(client, tensor, 7, 1, start=True) == ""
    assert server.stop() == 0, server.log
