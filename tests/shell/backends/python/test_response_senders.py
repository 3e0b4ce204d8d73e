"""The responses that a model sends through the senders of its requests."""

import threading

import pytest

from halimede.core.types import ErrorCode, InferenceError
from support.python_executions import failure, imported
from support.python_models import FakeHost, asked, body, runner_of, values

SEND = "requests[0].get_response_sender().send(pb.InferenceResponse([pb.Tensor('OUT', np.ones(1, np.float32))]), {})\n"


@pytest.mark.parametrize("flags", [0, 1])
@pytest.mark.parametrize("result", ["None", "[None]", "[pb.InferenceResponse([])]"])
def test_non_decoupled_model_may_send_one_response(tmp_path, flags, result):
    host = FakeHost()
    replies = runner_of(tmp_path, body(SEND.format(flags) + f"return {result}"), host).execute([asked(3)])
    assert replies == [None]
    [(key, answer, final)] = host.answers
    assert (key, values(answer), final) == (3, {"OUT": [1.0]}, True)


def test_returned_response_is_used_if_the_sender_was_not(tmp_path):
    host = FakeHost()
    code = "senders = []\n" + body(
        "senders.append(requests[0].get_response_sender()); return [pb.InferenceResponse([])]"
    )
    [reply] = runner_of(tmp_path, code, host).execute([asked()])
    assert values(reply) == {}
    assert host.answers == []


def test_sent_response_stays_valid_if_the_batch_fails_later(tmp_path):
    host = FakeHost()
    replies = runner_of(tmp_path, body(SEND.format(1) + "raise ValueError('late')"), host).execute([asked(1), asked(2)])
    assert replies == [None, failure("ValueError: late")]
    assert [key for key, _, _ in host.answers] == [1]


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ("s.send()", "Inference Response object must be provided when the response flags is set to zero."),
        ("s.send(r, flags=5)", "Unable to send response. Unsupported flag provided."),
        ("s.send(flags=1)", "Unable to send response. Non-decoupled model cannot send complete final before sending a response."),
        ("s.send(r, 1); s.send(r)", "Unable to send response. Non-decoupled model cannot send more than one response."),
        ("s.send(r); s.send(flags=1); s.send(flags=1)", "Unable to send response. Response sender has been closed."),
    ],
)  # fmt: skip
def test_sender_refuses_invalid_responses(tmp_path, lines, text):
    host = FakeHost()
    code = "said = []\n" + body(
        f"""
        s, r = requests[0].get_response_sender(), pb.InferenceResponse([])
        try:
            {lines}
        except pb.TritonModelException as error:
            pb.Logger.log_warn(str(error))
        return [None]
        """
    )
    runner_of(tmp_path, code, host).execute([asked()])
    assert host.logs == [("WARNING", text)]
    assert len(host.answers) == (1 if "send(r" in lines and "flags=5" not in lines else 0)


def test_decoupled_model_sends_any_responses_and_then_the_end(tmp_path):
    code = body(
        """
        sender = requests[0].get_response_sender()
        assert sender is requests[0].get_response_sender()
        for n in range(3):
            sender.send(pb.InferenceResponse([pb.Tensor("OUT", np.array([n], np.float32))]))
        sender.send(pb.InferenceResponse([], error=pb.TritonError("odd")))
        sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        try:
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except pb.TritonModelException as error:
            pb.Logger.log_warn(str(error))
        """
    )
    host = FakeHost()
    assert runner_of(tmp_path, code, host, decoupled=True).execute([asked(4)]) == [None]
    assert [(key, final) for key, _, final in host.answers] == [(4, False)] * 4 + [(4, True)]
    assert [values(reply) for _, reply, _ in host.answers[:3]] == [{"OUT": [0.0]}, {"OUT": [1.0]}, {"OUT": [2.0]}]
    assert host.answers[3][1] == InferenceError(ErrorCode.INTERNAL, "odd")
    assert host.answers[4][1] is None
    assert host.logs == [("WARNING", "Unable to send response. Response sender has been closed.")]


def test_sender_works_after_execute_and_without_its_request(tmp_path):
    code = body(
        """
        def work(sender):
            go.wait(10)
            sender.send(pb.InferenceResponse([]), 1)
            sent.set()
        threading.Thread(target=work, args=(requests[0].get_response_sender(),)).start()
        """
    )
    host = FakeHost()
    runner = runner_of(tmp_path, "go, sent = threading.Event(), threading.Event()\n" + code, host, decoupled=True)
    assert runner.execute([asked(9)]) == [None]
    assert host.answers == []
    imported().go.set()
    assert imported().sent.wait(10)
    assert [(key, final) for key, _, final in host.answers] == [(9, True)]


def test_only_one_of_many_threads_can_end_a_request(tmp_path):
    host = FakeHost()
    runner = runner_of(
        tmp_path, "senders = []\n" + body("senders.append(requests[0].get_response_sender())"), host, decoupled=True
    )
    runner.execute([asked()])
    model = imported()
    refused = []

    def send() -> None:
        for flags in (0, 0, 1, 0):
            try:
                model.senders[0].send(model.pb.InferenceResponse([]), flags)
            except model.pb.TritonModelException as error:
                refused.append(str(error))

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [final for _, _, final in host.answers].count(True) == 1
    assert host.answers[-1][2]
    assert len(host.answers) + len(refused) == 32
    assert set(refused) == {"Unable to send response. Response sender has been closed."}


def test_decoupled_failure_ends_open_requests_and_senders(tmp_path):
    code = "kept = []\n" + body(
        """
        kept.extend(requests)
        requests[0].get_response_sender().send(flags=1)
        requests[1].get_response_sender().send(pb.InferenceResponse([]))
        raise ValueError("boom")
        """
    )
    host = FakeHost()
    replies = runner_of(tmp_path, code, host, decoupled=True).execute([asked(0), asked(1), asked(2)])
    assert replies == [None, failure("ValueError: boom"), failure("ValueError: boom")]
    for request in imported().kept:
        with pytest.raises(Exception, match="Response sender has been closed"):
            request.get_response_sender().send(flags=1)


class SlowClient(FakeHost):
    """Takes a first answer when it is told to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.asked, self.takes = threading.Event(), threading.Event()

    def respond(self, request, reply, final) -> None:
        self.asked.set()
        assert self.takes.wait(10)
        super().respond(request, reply, final)


def test_failure_does_not_wait_for_a_blocked_sender(tmp_path):
    code = "threads = []\n" + body(
        """
        sender = requests[0].get_response_sender()
        threads.append(threading.Thread(target=sender.send, args=(pb.InferenceResponse([]),)))
        threads[0].start()
        assert asked.wait(10)
        raise ValueError("boom")
        """
    )
    host = SlowClient()
    runner = runner_of(tmp_path, code, host, decoupled=True)
    imported().asked = host.asked
    assert runner.execute([asked()]) == [None]
    assert host.answers == []
    host.takes.set()
    imported().threads[0].join()
    assert [(reply if final else None, final) for _, reply, final in host.answers] == [
        (None, False),
        (failure("ValueError: boom"), True),
    ]


def test_a_decoupled_model_returns_nothing(tmp_path):
    [error] = runner_of(tmp_path, body("return []"), decoupled=True).execute([asked()])
    assert error == failure("Python model 'm_0' is using the decoupled mode and the execute function must return None.")


def test_a_sender_sends_only_requested_outputs(tmp_path):
    code = body(
        """
        one = np.ones(1, np.float32)
        for r in requests:
            r.get_response_sender().send(pb.InferenceResponse([pb.Tensor("OUT", one), pb.Tensor("MORE", one)]), 1)
        """
    )
    host = FakeHost()
    runner_of(tmp_path, code, host, decoupled=True).execute([asked(0, outputs=("MORE",)), asked(1)])
    assert [list(values(reply)) for _, reply, _ in host.answers] == [["MORE"], ["OUT", "MORE"]]


def test_servers_refusal_of_a_response_is_raised_in_the_model(tmp_path):
    host = FakeHost(refuses=InferenceError(ErrorCode.UNAVAILABLE, "the server is gone"))
    code = body("requests[0].get_response_sender().send(flags=1)")
    assert runner_of(tmp_path, code, host, decoupled=True).execute([asked()])[0] is None
    assert "TritonModelException: Unable to send response. the server is gone" in host.logs[0][1]


def test_model_sees_that_its_client_disconnected(tmp_path):
    code = body(
        """
        seen = [q() for r in requests for q in (r.is_cancelled, r.get_response_sender().is_cancelled)]
        pb.Logger.log_info(str(seen))
        """
    )
    host = FakeHost(cancelled={1})
    runner_of(tmp_path, code, host, decoupled=True).execute([asked(0), asked(1)])
    assert host.logs == [("INFO", "[False, False, True, True]")]
