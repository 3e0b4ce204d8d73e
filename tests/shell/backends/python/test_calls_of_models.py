"""Models that call other models while they execute."""

from halimede.core.types import DataType, ErrorCode, InferenceError
from halimede.core.types import InferenceRequest as Asked
from halimede.core.types import InferenceResponse as Answered
from halimede.core.types import Tensor as CoreTensor
from support.python_models import FakeHost, asked, body, fp32, runner_of, values


def answer(*outputs: CoreTensor) -> Answered:
    return Answered("other", "3", outputs=list(outputs))


ASK = """
def ask():
    one = pb.Tensor("IN", np.ones(1, np.float32))
    return pb.InferenceRequest(model_name="other", inputs=[one], requested_output_names=["OUT"])
def tell(what):
    try:
        pb.Logger.log_info(what())
    except pb.TritonModelException as error:
        pb.Logger.log_info(str(error))
"""


def test_model_may_call_others_only_while_it_is_loaded(tmp_path):
    host = FakeHost(infers=lambda _: [answer(fp32("OUT", [1]))])
    code = (
        ASK
        + body("tell(lambda: str(ask().exec().has_error()))\nreturn [pb.InferenceResponse([]) for r in requests]")
        + """
    def initialize(self, args):
        tell(lambda: str(ask().exec()))
        tell(lambda: str(ask().exec(decoupled=True)))
    def finalize(self):
        tell(lambda: str(ask().exec()))
"""
    )
    runner = runner_of(tmp_path, code, host)
    runner.execute([asked()])
    runner.close()
    refusal = "BLS is only supported during the 'execute' function."
    assert [line for _, line in host.logs] == [refusal, refusal, "False", refusal]
    assert len(host.inferred) == 1


def test_model_calls_for_each_request_and_passes_outputs_on(tmp_path):
    host = FakeHost(infers=lambda core: [answer(CoreTensor("OUT", DataType.FP32, (1, 2), core.inputs[0].data))])
    code = body(
        """
        responses = []
        for r in requests:
            asked = pb.InferenceRequest(request_id=r.request_id(), model_name="other", inputs=r.inputs(),
                                        requested_output_names=["OUT"], trace=r.trace())
            responses.append(pb.InferenceResponse(asked.exec().output_tensors()))
        return responses
        """
    )
    replies = runner_of(tmp_path, code, host).execute([asked(5, id="a"), asked(7, id="b")])
    assert [values(reply) for reply in replies] == [{"OUT": [[1.0, 5.0]]}, {"OUT": [[1.0, 7.0]]}]
    assert [core.id for core in host.inferred] == ["a", "b"]
    assert replies[0].outputs[0].data is host.inferred[0].inputs[0].data


def test_error_of_a_called_model_can_be_returned_as_own_error(tmp_path):
    host = FakeHost(infers=lambda _: [Answered("other", "3", error=InferenceError(ErrorCode.UNAVAILABLE, "busy"))])
    code = body(
        """
        asked = pb.InferenceRequest(model_name="other", inputs=requests[0].inputs(), requested_output_names=[])
        return [pb.InferenceResponse(error=asked.exec().error())]
        """
    )
    assert runner_of(tmp_path, code, host).execute([asked()]) == [InferenceError(ErrorCode.UNAVAILABLE, "busy")]


def test_received_request_can_be_executed_again_by_its_model(tmp_path):
    host = FakeHost(infers=lambda core: [answer(core.inputs[0])])
    code = body("requests[0].set_flags(2)\nrequests[0].exec()\nreturn [pb.InferenceResponse([])]")
    hosted = asked(3, id="x", parameters={"a": 1}, sequence_id=4, sequence_start=True)
    runner_of(tmp_path, code, host).execute([hosted])
    [core] = host.inferred
    assert core == Asked(
        "m", id="x", inputs=hosted.request.inputs, parameters={"a": 1}, sequence_id=4, sequence_end=True, wants_one=True
    )
