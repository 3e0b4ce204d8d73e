"""Python models on a running server: their errors, their resources, and the functions of `pb_utils`."""

import re
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient

from support.background import in_background
from support.calls import index, load, unload
from support.latency import median_ms
from support.models import add_identity, add_onnx_identity, add_simple, add_simple_string, write_config
from support.served import BATCHING, ECHO, HEAD, Stage, add_python, body, infer, notes_file, parameter, workers
from support.server import RunningServer, Start, wait_until
from support.virtual_environment import make_environment


def failed(instance: str, why: str) -> str:
    return f"Failed to process the request(s) for model instance '{instance}', message: {why}"


def choosing(cases: dict[int, str]) -> str:
    """An `execute` that runs the case of the first number of its first request; other numbers are echoed."""
    lines = [
        f"if value(requests[0]) == {number}:\n" + "".join(f"    {line}\n" for line in code.splitlines())
        for number, code in cases.items()
    ]
    return "".join(lines) + ECHO


def test_an_exception_in_execute_fails_its_batch_with_the_cause(stage: Stage) -> None:
    server = stage.server
    stage.deploy("raising", f"if any(value(r) < 0 for r in requests): raise ValueError('boom')\n{ECHO}", extra=BATCHING)
    log_start = len(server.log)
    mates = [in_background(lambda n=n: infer(server, "raising", n)) for n in (1, -1, 2)]
    assert [mate.result(30) for mate in mates] == [(500, failed("raising_0_0", "ValueError: boom"))] * 3
    assert infer(server, "raising", 3) == (200, [3])
    traceback = [line for line in server.log[log_start:].splitlines() if "Traceback" in line]
    assert len(traceback) == 1
    assert "ValueError: boom" in traceback[0]
    assert "raising/1/model.py" in traceback[0]


def test_a_breakpoint_in_a_served_model_names_the_command_to_debug_it(stage: Stage) -> None:
    cases = {-1: "breakpoint()", -2: "import pdb\npdb.set_trace()\nvalue(requests[0])"}
    stage.deploy("stopping", choosing(cases))
    text = "a served model has no terminal for a debugger; run it by `halimede debug MODEL_DIR REQUEST.json`"
    assert infer(stage.server, "stopping", -1) == (500, failed("stopping_0_0", f"RuntimeError: {text}"))
    assert infer(stage.server, "stopping", -2) == (500, failed("stopping_0_0", f"BdbQuit: {text}"))
    assert infer(stage.server, "stopping", 3) == (200, [3])


MISTAKES = {
    -1: ("return []", "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
         "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0"),
    -2: ("return [answer(requests[0])] * 2", "Number of InferenceResponse objects do not match the number of "
         "InferenceRequest objects. InferenceRequest(s) size is:1, and InferenceResponse(s) size is:2"),
    -3: ("return None", "Expected a list in the execute return, found type '<class 'NoneType'>': execute must return a "
         "list of responses, one for each request."),
    -4: ("return [None]", "Expected an 'InferenceResponse' object in the execute function return list, found None for a "
         "request whose response sender was never asked for, so that nothing can answer it."),
    -5: ("return ['text']", "Expected an 'InferenceResponse' object in the execute function return list, found type "
         "'<class 'str'>'."),
    -6: ("open('/nowhere/secret')", "FileNotFoundError: [Errno 2] No such file or directory: 'secret'"),
}  # fmt: skip


def test_a_wrong_return_value_is_an_error_at_once(stage: Stage) -> None:
    server = stage.server
    stage.deploy("mistakes", choosing({number: code for number, (code, _) in MISTAKES.items()}))
    for number, (code, text) in MISTAKES.items():
        begun = time.monotonic()
        assert infer(server, "mistakes", number) == (500, failed("mistakes_0_0", text)), code
        assert time.monotonic() - begun < 2  # Triton hangs on None
    assert infer(server, "mistakes", 3) == (200, [3])


@pytest.mark.load
def test_a_wrong_return_value_is_an_error_within_100_ms(stage: Stage) -> None:
    stage.deploy("mistakes", choosing({number: code for number, (code, _) in MISTAKES.items()}))

    def took_ms(number: int) -> float:
        begun = time.monotonic()
        assert infer(stage.server, "mistakes", list(MISTAKES)[number % len(MISTAKES)])[0] == 500
        return (time.monotonic() - begun) * 1e3

    assert median_ms(took_ms, attempts=3 * len(MISTAKES)) <= 100


def tensor(array: str) -> str:
    return f"return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', {array})])]"


OUTPUTS = {
    -1: (tensor("np.ones((1, 3), np.int32)"), 200, [1, 1, 1]),
    -2: (tensor("np.ones((1, 3), np.float64)"), 200, [1, 1, 1]),
    -3: (tensor("np.ones((2, 3), np.float32)"), 200, [1, 1, 1, 1, 1, 1]),
    -4: (tensor("np.ones((), np.float32)"), 200, [1]),
    -5: (tensor("np.array([[b'a', b'b']], object)"), 200, ["a", "b"]),
    -6: (tensor("np.array([[7]], object)"), 200, ["7"]),
    -7: (tensor("np.array([['2020-01-01']], 'datetime64[D]')"), 500, ""),
    -8: (tensor("np.ones((1, 3), np.complex64)"), 500, ""),
    -9: (tensor("np.ones((1, 3), [('a', np.float32)])"), 500, ""),
    -12: (tensor("np.float32(3)"), 500, ""),
    -13: (tensor("[1.0, 2.0]"), 500, ""),
    -14: (tensor("np.lib.stride_tricks.as_strided(np.ones(1, np.float32), (1, 1 << 40), (0, 0))"), 500, ""),
    -20: (tensor("np.arange(6, dtype=np.float32).reshape(1, 6)[:, ::2]"), 200, [0, 2, 4]),
    -21: (tensor("np.arange(3, dtype=np.float32).reshape(1, 3)[:, ::-1]"), 200, [2, 1, 0]),
    -22: (tensor("np.arange(6, dtype=np.float32).reshape(6, 1).T"), 200, [0, 1, 2, 3, 4, 5]),
    -23: (tensor("np.broadcast_to(np.float32(7), (1, 3))"), 200, [7, 7, 7]),
    -24: (tensor("np.ones((1, 3), '>f4')"), 200, [1, 1, 1]),
    -25: (tensor("np.ones((1, 0), np.float32)"), 200, []),
    -26: (tensor("np.asfortranarray(np.arange(3, dtype=np.float32).reshape(1, 3))"), 200, [0, 1, 2]),
    -27: (tensor("(lambda a: (a.setflags(write=False), a)[1])(np.ones((1, 2), np.float32))"), 200, [1, 1]),
}  # fmt: skip


def test_every_kind_of_output_is_sent_correctly_or_refused_by_name(stage: Stage) -> None:
    server = stage.server
    # Limits the address space, so that a model that allocates a tebibyte gets an error.
    limited = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))"
    stage.deploy("outputs", choosing({number: code for number, (code, _, _) in OUTPUTS.items()}), head=limited)
    for number, (code, status, expected) in OUTPUTS.items():
        got, answer = infer(server, "outputs", number)
        assert got == status, (code, answer)
        assert answer == expected if status == 200 else expected in str(answer), (code, answer)
    assert infer(server, "outputs", 3) == (200, [3])
    assert workers(server, "outputs")


def test_a_model_out_of_memory_fails_its_batch_and_continues(stage: Stage) -> None:
    server = stage.server
    limited = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))"
    cases = {
        -1: "np.ones(1 << 40)",
        -2: "bytearray(1 << 40)",
        -3: "held = []\nwhile True: held.append(bytes(64 << 20))",
    }
    stage.deploy("memory", choosing(cases), head=limited)
    before = workers(server, "memory")
    for number in cases:
        status, text = infer(server, "memory", number)
        assert (status, "MemoryError" in str(text)) == (500, True), text
        assert infer(server, "memory", 3) == (200, [3])
    assert workers(server, "memory") == before


FAKE_TORCH = """
class OutOfMemoryError(RuntimeError): pass
class AcceleratorError(RuntimeError): pass
OutOfMemoryError.__module__ = AcceleratorError.__module__ = "torch"
"""
STICKY = {
    -2: "raise AcceleratorError('CUDA error: an illegal memory access was encountered')",
    -3: "raise RuntimeError('CUDA error: an illegal memory access was encountered')",
    -4: "raise RuntimeError('CUDA error: device-side assert triggered')",
}


def test_gpu_out_of_memory_fails_the_batch_a_lost_context_the_worker(stage: Stage) -> None:
    server = stage.server
    cases = {-1: "raise OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')", **STICKY}
    stage.deploy("gpu", choosing(cases), head=FAKE_TORCH)
    [before] = workers(server, "gpu")
    text = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert infer(server, "gpu", -1) == (500, failed("gpu_0_0", text))
    assert workers(server, "gpu") == [before]
    for number in STICKY:
        status, text = infer(server, "gpu", number)
        assert (status, "CUDA error" in str(text)) == (500, True), text
        assert infer(server, "gpu", 3) == (200, [3])
        wait_until(lambda before=before: before not in workers(server, "gpu"), "another worker", server, 10)
        [before] = workers(server, "gpu")


PARALLEL = {
    1: "with multiprocessing.get_context('fork').Pool(2) as pool: assert pool.map(abs, [-1, -2]) == [1, 2]",
    2: "with multiprocessing.get_context('spawn').Pool(1) as pool: assert pool.map(abs, [-1]) == [1]",
    3: "import asyncio\nassert asyncio.run(asyncio.sleep(0.01, 5)) == 5",
    4: "from concurrent.futures import ThreadPoolExecutor\nassert list(ThreadPoolExecutor(4).map(abs, [-1, -2])) == [1, 2]",
    5: "import subprocess\nassert subprocess.run(['echo', 'x'], capture_output=True).stdout == b'x\\n'",
    6: "held.append(multiprocessing.get_context('spawn').Lock())\nnote(held[0]._semlock.name)",
    7: "assert ends_by_itself() == -signal.SIGTERM",
}
PARALLEL_HEAD = """
import ctypes, multiprocessing, os, signal
from collections import deque
from itertools import chain, repeat
held = []

def ends_by_itself():
    child = os.fork()
    if not child:
        # No Python code runs between these calls: the process only waits when the signal arrives.
        deque(chain(map(ctypes.CDLL(None).kill, [os.getpid()], [signal.SIGTERM]), map(os._exit, [7])))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def test_a_model_may_use_processes_threads_and_event_loops(stage: Stage) -> None:
    server = stage.server
    stage.deploy("parallel", choosing(PARALLEL), head=PARALLEL_HEAD)
    for number, code in PARALLEL.items():
        assert infer(server, "parallel", number) == (200, [number]), code
    semaphore = Path("/dev/shm/sem." + stage.notes("parallel")[0].removeprefix("/"))
    assert semaphore.exists()
    stage.clear()
    wait_until(lambda: not semaphore.exists(), "what multiprocessing made to be gone", server, 10)


def test_a_model_with_async_execute_runs_several_batches_at_a_time(stage: Stage) -> None:
    server = stage.server
    execute = f"import asyncio\nawait asyncio.sleep(0.3)\nif value(requests[0]) < 0: raise ValueError('boom')\n{ECHO}"
    stage.deploy("coroutine", execute, how="async def", extra=parameter("MAX_CONCURRENCY", "8"))
    begun = time.monotonic()
    calls = [in_background(lambda n=n: infer(server, "coroutine", n)) for n in (1, 2, -1, 3, 4, 5, 6, 7)]
    answers = [each.result(30) for each in calls]
    assert answers[2] == (500, failed("coroutine_0_0", "ValueError: boom"))
    assert [answer for answer in answers if answer[0] == 200] == [(200, [n]) for n in (1, 2, 3, 4, 5, 6, 7)]
    assert time.monotonic() - begun < 2  # 0.3 s in parallel, 2.4 s in sequence


def samples(server: RunningServer, family: str) -> dict[str, float]:
    """Values by labels."""
    lines = [line for line in server.metrics().splitlines() if re.match(rf"{family}[{{ ]", line)]
    return {line.removeprefix(family).rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


METRICS = """
def initialize(self, args):
    family = pb_utils.MetricFamily(name="requests_seen", description="of a test", kind=pb_utils.MetricFamily.COUNTER)
    self.seen = family.Metric(labels={"who": "metrics"})
    self.family = family
"""


def test_metrics_show_an_update_before_execute_returns(stage: Stage) -> None:
    server, notes = stage.server, notes_file(stage.repository, "busy")
    hold = "self.seen.increment(1)\nnote('counted')\nwhile os.path.exists(NOTES): time.sleep(0.01)\n"
    stage.deploy("busy", hold + ECHO, methods=METRICS)
    call = in_background(lambda: infer(server, "busy"))
    wait_until(lambda: stage.notes("busy") == ["counted"], "the update", server)
    try:
        assert samples(server, "requests_seen") == {'{who="metrics"}': 1}
        assert not call.done()
    finally:
        notes.unlink()
    assert call.result(30)[0] == 200


def test_metrics_of_a_model_are_summed_over_instances_and_outlive_a_worker(stage: Stage) -> None:
    server = stage.server
    note_instance = "self.seen.increment(len(requests))\nnote(os.getpid())\ntime.sleep(0.05)\n"
    stage.deploy("metrics", note_instance + ECHO, methods=METRICS, count=2)
    assert samples(server, "requests_seen") == {'{who="metrics"}': 0}
    calls = [in_background(lambda: infer(server, "metrics")) for _ in range(8)]
    assert [each.result(30)[0] for each in calls] == [200] * 8
    assert len(set(stage.notes("metrics"))) == 2
    assert samples(server, "requests_seen") == {'{who="metrics"}': 8}
    first = workers(server, "metrics")[0]
    first.kill()
    wait_until(
        lambda: len(workers(server, "metrics")) == 2 and first not in workers(server, "metrics"), "another", server
    )
    for _ in range(4):
        infer(server, "metrics")
    assert samples(server, "requests_seen") == {'{who="metrics"}': 12}
    assert unload(server, "metrics") == 200
    wait_until(lambda: "requests_seen" not in server.metrics(), "the metrics to be gone", server, 10)


def test_lines_of_the_logger_are_lines_of_the_servers_log(stage: Stage) -> None:
    server = stage.server
    execute = f"""
        pb_utils.Logger.log_info("informed")
        pb_utils.Logger.log_warn("warned")
        pb_utils.Logger.log_error("of a\\nsecond line")
        pb_utils.Logger.log_verbose("whispered")
        pb_utils.Logger.log("plain", pb_utils.Logger.INFO)
        print("printed \\u00e9", flush=True)
        print("to stderr", file=sys.stderr)
        {ECHO}
        """
    stage.deploy("logger", execute)
    log_start = len(server.log)
    assert infer(server, "logger", 1) == (200, [1])
    wait_until(lambda: "to stderr" in server.log[log_start:], "the lines", server, 10)
    lines = server.log[log_start:].splitlines()
    found = {
        text: next((line[0] for line in lines if text in line), "") for text in ("informed", "warned", "of a", "plain")
    }
    assert found == {"informed": "I", "warned": "W", "of a": "E", "plain": "I"}
    assert any("printed \u00e9" in line and "logger:" in line for line in lines)
    assert any(re.search(r'model\.py:\d+] "informed"', line) for line in lines)
    assert "whispered" not in server.log[log_start:]
    assert any("of a\\nsecond line" in line for line in lines)


MANAGING = """
def initialize(self, args):
    self.ready_at_start = pb_utils.is_model_ready("managed")
    pb_utils.load_model(model_name="managed")
    self.ready_then = pb_utils.is_model_ready(model_name="managed", model_version="1")
"""


def test_an_idle_worker_uses_no_cpu(stage: Stage) -> None:
    """A worker spins for the next batch only for a short time."""
    stage.deploy("sleeper")
    with httpclient.InferenceServerClient(stage.server.http_url) as client:
        tensor = httpclient.InferInput("IN", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
        for _ in range(200):
            client.infer("sleeper", [tensor])
    (worker,) = workers(stage.server, "sleeper")
    used = worker.cpu_times().user + worker.cpu_times().system
    time.sleep(0.5)  # the measured time
    assert worker.cpu_times().user + worker.cpu_times().system - used < 0.2


def test_models_that_load_each_other_do_not_deadlock(stage: Stage) -> None:
    """The second model's call is refused, and the loads of both fail."""
    for name, other in (("left", "right"), ("right", "left")):
        stage.add(name, methods=f"def initialize(self, args): pb_utils.load_model('{other}')")
    status, text = load(stage.server, "left")
    assert status == 400
    assert "model 'left' waits for model 'right', which therefore cannot load it" in text


def test_a_model_loads_and_unloads_others_from_initialize_and_execute(stage: Stage) -> None:
    server = stage.server
    stage.add("managed")
    execute = """
        what = value(requests[0])
        if what == 1: pb_utils.unload_model("managed")
        if what == 2: pb_utils.load_model("managed")
        if what == 3: pb_utils.load_model("managing")
        if what == 4: pb_utils.load_model("nowhere")
        states = [self.ready_at_start, self.ready_then, pb_utils.is_model_ready("managed"), pb_utils.is_model_ready("nowhere")]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([states], np.float32))]) for _ in requests]
        """
    stage.deploy("managing", execute, methods=MANAGING)
    assert infer(server, "managed", 5) == (200, [5])
    assert infer(server, "managing", 0) == (200, [0, 1, 1, 0])
    assert infer(server, "managing", 1) == (200, [0, 1, 0, 0])
    assert infer(server, "managed", 5)[0] == 404
    assert infer(server, "managing", 2) == (200, [0, 1, 1, 0])
    assert infer(server, "managed", 5) == (200, [5])
    for number, cause in ((3, "cannot load or unload itself"), (4, "nowhere")):
        status, text = infer(server, "managing", number)
        assert (status, cause in str(text)) == (500, True), text


BACKEND = (
    HEAD
    + """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(4)
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]})
        return config

    def initialize(self, args):
        with open(os.path.join(args["model_repository"], args["model_version"], "factor.txt")) as file:
            self.factor = np.float32(file.read())

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(r, "IN").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", each * self.factor)]) for each in inputs]
"""
)


def test_a_backend_may_be_one_python_file(start: Start, repository: Path, tmp_path: Path) -> None:
    directory = tmp_path / "backends" / "scaling"
    directory.mkdir(parents=True)
    (directory / "model.py").write_text(BACKEND)
    for name, factor in (("double", "2"), ("triple", "3")):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "factor.txt").write_text(factor)
        write_config(repository / name, f'name: "{name}" backend: "scaling"')
    server = start("--model-repository", repository, "--backend-directory", tmp_path / "backends")
    assert infer(server, "double", 1, 2) == (200, [2, 4])
    assert infer(server, "triple", 1, 2) == (200, [3, 6])
    config = server.get("/v2/models/double/config").json
    assert (config["max_batch_size"], config["backend"]) == (4, "scaling")
    assert server.stop() == 0


def test_a_model_can_have_its_own_execution_environment(stage: Stage, tmp_path: Path) -> None:
    server, repository = stage.server, stage.repository
    make_environment(tmp_path / "environment")
    check = "import only_here\nassert only_here.WORD == 'found'"
    add_python(repository, "own", head=check, extra=parameter("EXECUTION_ENV_PATH", str(tmp_path / "environment")))
    add_python(
        repository, "within", head=check, extra=parameter("EXECUTION_ENV_PATH", "$$TRITON_MODEL_DIRECTORY/environment")
    )
    shutil.copytree(tmp_path / "environment", repository / "within" / "environment", symlinks=True)
    add_python(repository, "without", head=check)
    assert load(server, "own") == load(server, "within") == (200, "")
    assert load(server, "without")[0] == 400
    assert infer(server, "own", 3) == (200, [3])
    assert infer(server, "within", 3) == (200, [3])
    assert "No module named 'only_here'" in index(server)["without", "1"][1]
    [worker] = [each for each in workers(server) if each.cmdline()[-1] == "own_0_0"]
    assert worker.environ()["VIRTUAL_ENV"] == str(tmp_path / "environment")
    worker.kill()
    assert infer(server, "own", 3) == (200, [3])


IN_PROCESS = parameter("ISOLATION", "process")


def test_models_of_other_backends_give_the_same_answers_from_processes(stage: Stage) -> None:
    server, repository = stage.server, stage.repository

    def append(model: str, text: str) -> None:
        path = repository / model / "config.pbtxt"
        path.write_text((path.read_text() if path.exists() else f'name: "{model}" backend: "onnxruntime"\n') + text)

    for add in (add_simple, add_simple_string):
        name = add.__name__.removeprefix("add_")
        add(repository, name)
        add(repository, f"{name}_p")
        append(f"{name}_p", IN_PROCESS)
    add_identity(repository, "text", datatype="BYTES", dims="-1")
    add_identity(repository, "text_p", datatype="BYTES", dims="-1", extra=IN_PROCESS)
    add_onnx_identity(repository, "auto", "FP32", ["N", 4])
    add_onnx_identity(repository, "auto_p", "FP32", ["N", 4])
    append("auto_p", IN_PROCESS)
    for model in sorted(folder.name for folder in repository.iterdir()):
        assert load(server, model) == (200, "")
    numbers = np.arange(16, dtype=np.int32).reshape(1, 16)
    strings = numbers.astype(str).astype(object)
    cases = {
        "simple": [("INPUT0", "INT32", numbers), ("INPUT1", "INT32", numbers * 3)],
        "simple_string": [("INPUT0", "BYTES", strings), ("INPUT1", "BYTES", strings)],
        "text": [("IN", "BYTES", np.array([["a", "\u00e9" * 9000, ""]], object))],
        "auto": [("IN", "FP32", np.ones((1, 4), np.float32))],
    }
    processes = [each for each in workers(server) if each not in workers(server, "bystander")]
    assert {each.cmdline()[0] for each in processes} == {sys.executable}
    assert {each.name().partition("_p")[0] for each in processes} == {"simple", "simple_string", "text", "auto"}
    with httpclient.InferenceServerClient(server.http_url) as client:
        for model, inputs in cases.items():
            sent = []
            for name, datatype, array in inputs:
                sent.append(httpclient.InferInput(name, array.shape, datatype))
                sent[-1].set_data_from_numpy(array)
            here, there = client.infer(model, sent), client.infer(f"{model}_p", sent)
            outputs = [output["name"] for output in here.get_response()["outputs"]]
            assert outputs == [output["name"] for output in there.get_response()["outputs"]]
            for output in outputs:
                assert (here.as_numpy(output) == there.as_numpy(output)).all(), model
            assert client.get_model_metadata(model)["outputs"] == client.get_model_metadata(f"{model}_p")["outputs"]
    wrong = body(1, 2, 3)
    errors = [server.post(f"/v2/models/{model}/infer", wrong) for model in ("auto", "auto_p")]
    assert errors[0].status == errors[1].status == 400
    for worker in processes:
        worker.kill()
    answer = server.post("/v2/models/auto_p/infer", body(1, 2, 3, 4))
    assert (answer.status, answer.json["outputs"][0]["data"]) == (200, [1, 2, 3, 4])
