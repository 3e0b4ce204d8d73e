"""Models that call other models of the server: allowed calls and their results."""

import ast
import json

import numpy as np
import pytest
import tritonclient.http as httpclient

from support.background import in_background
from support.calling import CALLS, add_async_script, add_count, add_script, each, load_on, run
from support.calls import executing, load
from support.models import add_identity, add_simple, write_config
from support.served import ECHO, Stage, infer, parameter
from support.server import wait_until


def test_a_model_calls_models_of_all_kinds(stage: Stage) -> None:
    server = stage.server
    add_simple(stage.repository, "onnxes")
    add_identity(stage.repository, "same", dims="-1")
    load_on(stage, "onnxes")
    load_on(stage, "same")
    stage.deploy("double", each("2 * x"))
    add_count(stage)
    add_script(stage)
    sum_and_difference = """
a, b = tensor(np.full((1, 16), 5, np.int32), "INPUT0"), tensor(np.full((1, 16), 2, np.int32), "INPUT1")
both = ask("onnxes", a, b, outputs=["OUTPUT1", "OUTPUT0"]).exec()
one = ask("onnxes", a, b, outputs=["OUTPUT1"]).exec()
return [(t.name(), t.as_numpy()[0, 0].item()) for r in (both, one) for t in r.output_tensors()]
"""
    found = run(server, sum_and_difference)
    assert sorted(found[:2]) == [("OUTPUT0", 7), ("OUTPUT1", 3)]
    assert found[2:] == [("OUTPUT1", 3)]
    assert run(server, "return outcome(ask('same', row(1, 2)).exec())") == [[[1, 2]]]
    assert run(server, "return outcome(ask('double', row(4)).exec())") == [[[8]]]
    counted = "return [outcome(each) for each in ask('count', tensor(np.float32([2, 0]))).exec(decoupled=True)]"
    assert run(server, counted) == [[[0]], [[1]], []]
    # A model that is not decoupled can be called with `decoupled=True`.
    assert run(server, "return [outcome(each) for each in ask('double', row(1)).exec(decoupled=True)]") == [[[[2]]]]


def test_fields_of_a_call_reach_the_called_model(stage: Stage) -> None:
    server = stage.server
    called = """
for r in requests:
    note([r.request_id(), r.correlation_id(), r.flags(), r.timeout(), json.loads(r.parameters()), sorted(r.requested_output_names())])
return [answer(request, rows=3) for request in requests]
"""
    stage.deploy("called", called)
    add_script(stage)
    code = """
plain = ask("called", row(1)).exec()
start, end = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
memory = pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 0)
ask("called", row(1), outputs=[], request_id="r", correlation_id="seq", flags=start | end, timeout=15, trace=request.trace(),
    preferred_memory=memory, model_version=1, parameters={"a": 1, "b": "x", "c": True}).exec()
ask("called", row(1), correlation_id=7, flags=end).exec()
return plain.parameters(), plain.output_tensors()[0].is_cpu()
"""
    assert run(server, code) == ('{"rows":3}', True)
    assert [ast.literal_eval(line) for line in stage.notes("called")] == [
        ["", 0, 0, 0, {}, ["OUT"]],
        ["r", "seq", 3, 15, {"a": 1, "b": "x", "c": True}, ["OUT"]],
        ["", 7, 2, 0, {}, ["OUT"]],
    ]


def test_parallel_calls_of_one_request_share_batches(stage: Stage) -> None:
    server = stage.server
    stage.deploy(
        "shared", extra="dynamic_batching { max_queue_delay_microseconds: 500000 preferred_batch_size: [ 4 ] }"
    )
    add_async_script(stage)
    code = """
asked = [ask("shared", row(number)).async_exec() for number in range(8)]
return [outcome(response) for response in await asyncio.gather(*asked)]
"""
    assert run(server, code) == [[[[number]]] for number in range(8)]
    [statistics] = server.get("/v2/models/shared/stats").json["model_stats"]  # type: ignore[index]
    assert (statistics["inference_count"], statistics["execution_count"]) == (8, 2)
    assert [(each["batch_size"], each["compute_infer"]["count"]) for each in statistics["batch_stats"]] == [(4, 2)]


def test_the_event_loop_continues_while_calls_wait(stage: Stage) -> None:
    server = stage.server
    stage.deploy("gate", "while not os.path.exists(NOTES): time.sleep(0.005)\n" + ECHO)
    add_async_script(stage, extra=parameter("MAX_CONCURRENCY", "4"))
    first = in_background(lambda: run(server, "return outcome(await ask('gate', row(5)).async_exec())"))
    wait_until(lambda: executing(server, "gate") == 1, "the call", server)
    # The only process has a call in flight, and runs another request.
    assert run(server, "return 'free'") == "free"
    assert not first.done()
    (stage.repository.parent / "gate.notes").touch()
    assert first.result(30) == [[[5]]]


@pytest.mark.parametrize("rows", [1, 3])
def test_each_request_of_a_batch_has_calls_of_its_own(stage: Stage, rows: int) -> None:
    server = stage.server
    stage.deploy("half", each("x / 2"))
    execute = """
note(len(requests))
asked = [ask("half", *request.inputs()) for request in requests]
return [pb_utils.InferenceResponse(each.exec().output_tensors()) for each in asked]
"""
    stage.deploy("halves", execute, head=CALLS, extra="dynamic_batching { max_queue_delay_microseconds: 300000 }")
    clients = [in_background(lambda n=n: infer(server, "halves", *range(n, n + rows))) for n in range(5)]
    assert [client.result(30) for client in clients] == [
        (200, [number / 2 for number in range(n, n + rows)]) for n in range(5)
    ]
    assert sum(map(int, stage.notes("halves"))) == 5
    assert max(map(int, stage.notes("halves"))) > 1


def test_threads_of_a_model_call_at_the_same_time(stage: Stage) -> None:
    server = stage.server
    add_identity(stage.repository, "same", dims="-1")
    load_on(stage, "same")
    add_script(stage)
    code = """
found = {}
def work(number):
    found[number] = [outcome(ask("same", row(number, step)).exec()) for step in range(20)]
threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
return found
"""
    assert run(server, code) == {n: [[[[n, step]]] for step in range(20)] for n in range(8)}


def test_a_thread_calls_after_execute_has_returned(stage: Stage) -> None:
    server = stage.server
    add_identity(stage.repository, "same", dims="-1")
    load_on(stage, "same")
    add_script(stage)
    code = """
def work():
    go.wait(20)
    note(outcome(ask("same", row(3)).exec()))
globals()["go"] = go = threading.Event()
model.go = go
threading.Thread(target=work).start()
"""
    run(server, code)
    run(server, "model.go.set()")
    wait_until(lambda: stage.notes("script") == ["[[[3.0]]]"], "the thread's call", server)


def test_large_tensors_pass_through_calls_unchanged(stage: Stage) -> None:
    server = stage.server
    stage.deploy("negated", each("-x"))
    add_identity(stage.repository, "same", dims="-1")
    load_on(stage, "same")
    passing = """
first = ask("negated", *requests[0].inputs()).exec().output_tensors()[0]
second = ask("same", pb_utils.Tensor("IN", first.as_numpy())).exec().output_tensors()
return [pb_utils.InferenceResponse(second)]
"""
    stage.deploy("passing", passing, head=CALLS)
    client = httpclient.InferenceServerClient(server.http_url)
    for elements in (150_000, 5_000_000):  # 600 KB and 20 MB
        sent = np.random.default_rng(elements).random((1, elements), np.float32)
        given = httpclient.InferInput("IN", list(sent.shape), "FP32")
        given.set_data_from_numpy(sent)
        for _ in range(3):
            got = client.infer("passing", [given]).as_numpy("OUT")
            assert np.array_equal(got, -sent)


def test_texts_and_bfloat16_pass_through_calls_unchanged(stage: Stage) -> None:
    server = stage.server
    passing = "return [pb_utils.InferenceResponse(ask('{}', *r.inputs()).exec().output_tensors()) for r in requests]"
    for datatype, name in (("BYTES", "text"), ("BF16", "brain")):
        add_identity(stage.repository, name, datatype=datatype, dims="-1")
        load_on(stage, name)
        stage.deploy(f"{name}_caller", passing.format(name), head=CALLS, datatype=datatype)
    client = httpclient.InferenceServerClient(server.http_url)
    texts = np.array([["", "é", "\0", "x" * 100_000]], object)
    given = httpclient.InferInput("IN", [1, 4], "BYTES")
    given.set_data_from_numpy(texts)
    got = client.infer("text_caller", [given]).as_numpy("OUT")
    assert [each.decode() for each in got.ravel()] == texts.ravel().tolist()
    # The client's conversion to bfloat16 depends on its release.
    numbers = bytes.fromhex("c03f00c0")
    document = {
        "inputs": [
            {"name": "IN", "shape": [1, 2], "datatype": "BF16", "parameters": {"binary_data_size": len(numbers)}}
        ],
        "parameters": {"binary_data_output": True},
    }
    head = json.dumps(document).encode()
    answer = server.post(
        "/v2/models/brain_caller/infer", head + numbers, {"Inference-Header-Content-Length": str(len(head))}
    )
    assert answer.body[-len(numbers) :] == numbers, answer.body


def test_a_model_calls_an_ensemble_and_is_a_step_of_one(stage: Stage) -> None:
    server = stage.server
    stage.deploy("double", each("2 * x"))
    redouble = (
        "return [pb_utils.InferenceResponse(ask('double', *r.inputs()).exec().output_tensors()) for r in requests]"
    )
    stage.deploy("redouble", redouble, head=CALLS)
    step = (
        'model_name: "%s" model_version: -1 input_map { key: "IN" value: "%s" } output_map { key: "OUT" value: "%s" }'
    )
    (stage.repository / "twice" / "1").mkdir(parents=True, exist_ok=True)
    write_config(
        stage.repository / "twice",
        f"""
        name: "twice"
        platform: "ensemble"
        max_batch_size: 8
        input [ {{ name: "FROM" data_type: TYPE_FP32 dims: [ -1 ] }} ]
        output [ {{ name: "TO" data_type: TYPE_FP32 dims: [ -1 ] }} ]
        ensemble_scheduling {{ step [
            {{ {step % ("double", "FROM", "between")} }}, {{ {step % ("redouble", "between", "TO")} }}
        ] }}
        """,
    )
    # Unloaded before its steps.
    stage.names.insert(0, "twice")
    assert load(server, "twice") == (200, "")
    add_script(stage)
    code = "return outcome(ask('twice', tensor(np.float32([[1, 2]]), 'FROM'), outputs=['TO']).exec())"
    assert run(server, code) == [[[4, 8]]]


def test_a_model_that_was_just_loaded_can_be_called(stage: Stage) -> None:
    server = stage.server
    stage.add("late")
    add_script(stage)
    code = """
before = outcome(ask("late", row(1)).exec())
pb_utils.load_model("late")
during = pb_utils.is_model_ready("late"), outcome(ask("late", row(1)).exec())
pb_utils.unload_model("late")
return before, during
"""
    before, during = run(server, code)  # type: ignore[misc]
    error = "NOT_FOUND: Model late - Error when running inference: Request for unknown model: 'late' is not found"
    assert (before, during) == (error, (True, [[[1]]]))
