"""Models with sequence batching, as clients over HTTP and gRPC see them."""

import http.client
import json
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from support.background import in_background
from support.calls import executing, load, pending, unload
from support.ensemble_models import Tensors, add_ensemble, chain
from support.processes import resident_bytes
from support.served import Stage, body, workers
from support.server import RunningServer, wait_until

START, END = 1, 2
COUNTS = "def initialize(self, args):\n    self.counts, self.name = {}, args['model_instance_name']"
COUNT = """
    answers = []
    for request in requests:
        number = value(request)
        if number < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(number)
        key, flags = request.correlation_id(), request.flags()
        if flags & 1:
            self.counts[key] = 0
        self.counts[key] += 1
        note(f"{key} {flags} {self.counts[key]} {self.name} {len(requests)}")
        array = np.array([[self.counts[key], flags, len(requests), int(self.name.rpartition("_")[2])]], np.float32)
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]))
    return answers
"""
NO_START = (
    "inference request for sequence {} to model '{}' must specify the START flag on the first request of the sequence"
)

Infer = Callable[..., list[float]]
"""Numbers of OUT of a request of a model with a sequence id and flags. Raises InferenceServerException."""


def oldest(*, sequence_slots: int = 4, idle_us: int = 60_000_000, more: str = "") -> str:
    strategy = f"oldest {{ max_candidate_sequences: {sequence_slots} {more} }}"
    return f"sequence_batching {{ {strategy} max_sequence_idle_microseconds: {idle_us} }}"


def direct(*, idle_us: int = 60_000_000) -> str:
    return f"sequence_batching {{ direct {{ }} max_sequence_idle_microseconds: {idle_us} }}"


def deploy(stage: Stage, name: str, extra: str, **how: object) -> None:
    stage.deploy(name, COUNT, methods=COUNTS, extra=extra, **how)


def flagged(flags: int) -> dict[str, bool]:
    return {"sequence_start": bool(flags & START), "sequence_end": bool(flags & END)}


@contextmanager
def over_http(server: RunningServer) -> Iterator[Infer]:
    with httpclient.InferenceServerClient(server.http_url.removeprefix("http://"), concurrency=4) as client:

        def infer(model: str, number: float, sequence: int | str, flags: int = 0, **more: object) -> list[float]:
            wanted = httpclient.InferInput("IN", [1, 1], "FP32")
            wanted.set_data_from_numpy(np.array([[number]], np.float32))
            return (
                client.infer(model, [wanted], sequence_id=sequence, **flagged(flags), **more)
                .as_numpy("OUT")[0]
                .tolist()
            )

        yield infer


def grpc_input(number: float) -> grpcclient.InferInput:
    wanted = grpcclient.InferInput("IN", [1, 1], "FP32")
    wanted.set_data_from_numpy(np.array([[number]], np.float32))
    return wanted


@contextmanager
def over_grpc(server: RunningServer) -> Iterator[Infer]:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:

        def infer(model: str, number: float, sequence: int | str, flags: int = 0, **more: object) -> list[float]:
            result = client.infer(model, [grpc_input(number)], sequence_id=sequence, **flagged(flags), **more)
            return result.as_numpy("OUT")[0].tolist()

        yield infer


@contextmanager
def over_stream(server: RunningServer) -> Iterator[Infer]:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        results: queue.Queue[tuple[grpcclient.InferResult, InferenceServerException | None]] = queue.Queue()
        client.start_stream(lambda result, error: results.put((result, error)))

        def infer(model: str, number: float, sequence: int | str, flags: int = 0, **more: object) -> list[float]:
            client.async_stream_infer(model, [grpc_input(number)], sequence_id=sequence, **flagged(flags), **more)
            result, error = results.get(timeout=30)
            if error is not None:
                raise error
            return result.as_numpy("OUT")[0].tolist()

        yield infer
        client.stop_stream()


@pytest.fixture
def infer_grpc(stage: Stage) -> Iterator[Infer]:
    """One client, for several threads."""
    with over_grpc(stage.server) as infer:
        yield infer


@pytest.fixture(params=[over_http, over_grpc, over_stream], ids=["http", "grpc", "stream"])
def infer(request: pytest.FixtureRequest, stage: Stage) -> Iterator[Infer]:
    with request.param(stage.server) as infer:
        yield infer


def refused(infer: Infer, *arguments: object, **more: object) -> str:
    with pytest.raises(InferenceServerException) as caught:
        infer(*arguments, **more)
    return str(caught.value.message())


@pytest.mark.parametrize("strategy", [direct(), oldest()], ids=["direct", "oldest"])
def test_sequences_keep_their_state_at_their_instance(stage: Stage, infer: Infer, strategy: str) -> None:
    deploy(stage, "seq", strategy, count=2)
    first = infer("seq", 0, 42, START)
    second = infer("seq", 0, "forty-two", START)
    assert (first[:2], second[:2]) == ([1, START], [1, START])
    assert {first[3], second[3]} == {0, 1}, "they are spread over the instances"
    for count in (2, 3):
        assert infer("seq", 0, 42) == [count, 0, 1, first[3]]
        assert infer("seq", 0, "forty-two") == [count, 0, 1, second[3]]
    assert infer("seq", 0, 42, END)[:2] == [4, END]
    assert refused(infer, "seq", 0, 42) == NO_START.format(42, "seq")
    assert infer("seq", 0, 42, START | END)[:2] == [1, START | END]
    assert refused(infer, "seq", 0, 42) == NO_START.format(42, "seq")


def test_two_connections_share_a_sequence_in_order_of_arrival(stage: Stage) -> None:
    deploy(stage, "seq", oldest())
    server = stage.server
    with over_grpc(server) as first, over_http(server) as second:
        first("seq", 0, 42, START)
        slow = in_background(lambda: first("seq", 0.5, 42))
        wait_until(lambda: executing(server, "seq") == 1, "the slow request", server)
        assert second("seq", 0, 42)[0] == 3
        assert slow.result(30)[0] == 2


def test_an_ensemble_passes_sequences_on(stage: Stage, infer: Infer) -> None:
    deploy(stage, "seq", oldest())
    add_ensemble(
        stage.repository, "above", chain("seq"), inputs=Tensors(dims="-1"), outputs=Tensors(("OUT",), dims="-1")
    )
    stage.names.append("above")
    assert load(stage.server, "above") == (200, "")
    assert [infer("above", 0, 42, flags)[:2] for flags in (START, 0, END)] == [[1, START], [2, 0], [3, END]]
    assert NO_START.format(42, "seq") in refused(infer, "above", 0, 42)


@pytest.mark.parametrize("sequence_slots", [100, pytest.param(1000, marks=pytest.mark.large)])
def test_the_slots_of_abandoned_sequences_are_reused(stage: Stage, infer_grpc: Infer, sequence_slots: int) -> None:
    deploy(stage, "seq", oldest(sequence_slots=sequence_slots, idle_us=200_000))
    server = stage.server
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)

    def abandon(first: int) -> int:
        for sequence in range(first, first + sequence_slots):
            parameters = {"sequence_id": sequence, "sequence_start": True}
            connection.request("POST", "/v2/models/seq/infer", json.dumps(body(0.0) | {"parameters": parameters}))
            response = connection.getresponse()
            assert (response.status, response.read()[:1]) == (200, b"{")
        return resident_bytes(server)

    with closing(connection):
        memory = [abandon(1 + turn * sequence_slots) for turn in range(4)]
    assert memory[-1] - memory[1] < 16 << 20, memory
    wait_until(
        lambda: NO_START.format(4 * sequence_slots, "seq") == tried(infer_grpc, "seq", 4 * sequence_slots),
        "the end of the last",
        server,
    )


def tried(infer: Infer, model: str, sequence: int) -> str:
    # Each attempt belongs to the sequence, so the next one comes after the idle time.
    time.sleep(0.3)
    try:
        infer(model, 0, sequence)
    except InferenceServerException as error:
        return str(error.message())
    return ""


def test_a_dead_process_loses_its_sequences(stage: Stage, infer: Infer) -> None:
    deploy(stage, "seq", oldest())
    infer("seq", 0, 42, START)
    infer("seq", 0, 43, START)
    assert "(the state of its sequence is lost)" in refused(infer, "seq", -1, 42)
    for sequence in (42, 43):
        assert refused(infer, "seq", 0, sequence).startswith(f"sequence {sequence} for model 'seq' has lost its state")
    assert infer("seq", 0, 42, START)[:2] == [1, START]
    assert infer("seq", 0, 42)[:2] == [2, 0]


def test_a_cancelled_request_ends_its_sequence(stage: Stage, infer_grpc: Infer) -> None:
    deploy(stage, "seq", oldest())
    server = stage.server
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        results: queue.Queue[str] = queue.Queue()

        # The type of its result is private to tritonclient.
        def send(number: float, flags: int = 0):  # type: ignore[no-untyped-def]
            return client.async_infer(
                "seq",
                [grpc_input(number)],
                lambda result, error: results.put("ok" if error is None else error.status()),  # noqa: ARG005
                sequence_id=42,
                **flagged(flags),
            )

        send(1.0, START)
        wait_until(lambda: executing(server, "seq") == 1, "the slow request", server)
        cancelled, _ = send(0.0), send(0.0)
        wait_until(lambda: pending(server, "seq") == 2, "the queued requests", server)
        cancelled.cancel()
        assert [results.get(timeout=30) for _ in range(2)] == ["StatusCode.CANCELLED"] * 2
        assert results.get(timeout=30) == "ok"
    assert refused(infer_grpc, "seq", 0, 42) == NO_START.format(42, "seq")
    assert infer_grpc("seq", 0, 42, START)[0] == 1


def test_an_unloaded_model_gives_the_slots_to_the_backlog(stage: Stage, infer_grpc: Infer) -> None:
    deploy(stage, "seq", oldest(sequence_slots=1))
    infer_grpc("seq", 0, 1, START)
    waits = [in_background(lambda number=number: infer_grpc("seq", 0, number, START)) for number in (2, 3)]
    wait_until(lambda: pending(stage.server, "seq") == 2, "the backlog", stage.server)
    assert unload(stage.server, "seq") == 200
    # Less than the idle time, which is a minute.
    assert [each.result(30)[0] for each in waits] == [1, 1]


def test_a_reload_ends_the_open_sequences(stage: Stage, infer: Infer) -> None:
    """The new load has none of the sequences. The old one answers what it has accepted, then its process ends."""
    deploy(stage, "seq", oldest(sequence_slots=2))
    server = stage.server
    (old,) = workers(server, "seq")
    for sequence in (42, 43):
        infer("seq", 0, sequence, START)
    with over_grpc(server) as other:
        slow = in_background(lambda: other("seq", 1, 42))
        wait_until(lambda: executing(server, "seq") == 1, "the slow request", server)
        deploy(stage, "seq", oldest(sequence_slots=2))
        assert slow.result(30)[:2] == [2, 0]
    for sequence in (42, 43):
        assert refused(infer, "seq", 0, sequence) == NO_START.format(sequence, "seq")
    assert [infer("seq", 0, 42, flags)[:2] for flags in (START, 0, END)] == [[1, START], [2, 0], [3, END]]
    # Less than the idle time of 43, which is a minute.
    wait_until(lambda: not old.is_running(), "the end of the old process", server)


def test_a_call_into_the_own_sequence_is_refused_at_once(stage: Stage, infer_grpc: Infer) -> None:
    execute = """
        inputs = [pb_utils.Tensor("IN", np.zeros((1, 1), np.float32))]
        (request,) = requests
        if value(request):
            call = pb_utils.InferenceRequest(
                model_name="seq", requested_output_names=["OUT"], inputs=inputs, correlation_id=request.correlation_id()
            )
            error = call.exec().error()
            return [pb_utils.InferenceResponse(error=error)]
        return [answer(request)]
    """
    stage.deploy("seq", execute, count=2, extra=oldest())
    infer_grpc("seq", 0, 42, START)
    # The other instance is free, but does not have the sequence.
    began = time.monotonic()
    assert "the instance that has the call's sequence waits" in refused(infer_grpc, "seq", 1, 42)
    assert time.monotonic() - began < 10
    assert infer_grpc("seq", 0, 43, START) == [0.0]


def test_requests_of_several_sequences_share_batches(stage: Stage, infer_grpc: Infer) -> None:
    deploy(stage, "seq", oldest(sequence_slots=8, more="max_queue_delay_microseconds: 2000000"))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda sequence: infer_grpc("seq", 0, sequence, START), range(1, 5)))
    assert max(answer[2] for answer in answers) > 1


def test_sequences_are_whole_if_an_instance_has_more_of_them_than_fit_a_batch(stage: Stage, infer_grpc: Infer) -> None:
    deploy(stage, "seq", oldest(sequence_slots=12), max_batch_size=3)

    def play(sequence: int) -> list[float]:
        return [infer_grpc("seq", 0.005, sequence, flags)[0] for flags in (START, 0, 0, 0, 0, END)]

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(play, range(1, 13))) == [[1, 2, 3, 4, 5, 6]] * 12
    assert {int(note.split()[-1]) for note in stage.notes("seq")} <= {1, 2, 3}


def test_a_sequence_begins_again_if_its_process_dies_before_it_has_begun(stage: Stage, infer_grpc: Infer) -> None:
    deploy(stage, "seq", oldest(), max_batch_size=1)
    slow = in_background(lambda: infer_grpc("seq", 1, 1, START))
    wait_until(lambda: executing(stage.server, "seq") == 1, "the slow request", stage.server)
    deadly = in_background(lambda: refused(infer_grpc, "seq", -1, 2, START))
    wait_until(lambda: pending(stage.server, "seq") == 1, "the deadly request", stage.server)
    # When the deadly one begins, this one is the next.
    third = in_background(lambda: infer_grpc("seq", 0, 3, START))
    assert slow.result(30)[0] == 1
    assert "(the state of its sequence is lost)" in deadly.result(30)
    assert third.result(30)[0] == 1
    assert infer_grpc("seq", 0, 3)[0] == 2
