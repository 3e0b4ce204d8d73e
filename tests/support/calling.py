"""Models that call other models, and models for them to call."""

import ast

from support.calls import load
from support.served import Stage
from support.server import RunningServer

CALLS = """
import asyncio


def ask(model, *inputs, outputs=("OUT",), **more):
    return pb_utils.InferenceRequest(model_name=model, inputs=list(inputs), requested_output_names=outputs, **more)


def tensor(array, name="IN"):
    return pb_utils.Tensor(name, np.asarray(array))


def row(*numbers):
    return tensor(np.array([numbers], np.float32))


def outcome(response):
    error = response.error()
    if error is not None:
        return f"{error.code().name}: {error.message()}"
    return [tensor.as_numpy().tolist() for tensor in response.output_tensors()]
"""
"""For models that call: `ask` makes a request, `outcome` returns the output values or the error as text."""

SCRIPT = """
answers = []
for request in requests:
    code = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().ravel()[0].decode()
    names = {**globals(), "request": request, "model": self}
    exec(f"async def work():\\n" + "".join(f"    {line}\\n" for line in code.splitlines()), names)
    text = repr(RUN(names["work"]()))
    tensor = pb_utils.Tensor("OUT", np.array([[text]], object))
    answers.append(pb_utils.InferenceResponse([tensor]))
return answers
"""
"""A model that executes the Python code in its input and answers with the `repr` of the result."""

AS_PLAIN_CODE = """
def RUN(work):
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
"""


def add_script(stage: Stage, name: str = "script", **how: object) -> None:
    """A model that runs the code in a plain `execute`, without an event loop."""
    stage.deploy(name, SCRIPT, head=CALLS + AS_PLAIN_CODE, datatype="BYTES", **how)


def add_async_script(stage: Stage, name: str = "script", **how: object) -> None:
    """A model that runs the code in an `async def execute`; the code may await."""
    stage.deploy(
        name,
        SCRIPT.replace('RUN(names["work"]())', 'await names["work"]()'),
        head=CALLS,
        datatype="BYTES",
        how="async def",
        **how,
    )


def run(server: RunningServer, code: str, model: str = "script") -> object:
    answer = server.post(
        f"/v2/models/{model}/infer",
        {"inputs": [{"name": "IN", "shape": [1, 1], "datatype": "BYTES", "data": [code.strip()]}]},
    )
    assert answer.status == 200, answer.body
    return ast.literal_eval(answer.json["outputs"][0]["data"][0])  # type: ignore[index]


def each(expression: str) -> str:
    """An `execute` that answers each request with this expression of its numbers `x`."""
    return f"""
given = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", {expression})]) for x in given]
"""


COUNT = """
for request in requests:
    sender = request.get_response_sender()
    count, pause = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().ravel()[:2]
    threading.Thread(target=self.count, args=(sender, int(count), float(pause))).start()
return None
"""
COUNT_METHODS = """
def count(self, sender, count, pause):
    for number in range(count):
        if sender.is_cancelled():
            note("cancelled")
            break
        tensor = pb_utils.Tensor("OUT", np.array([number], np.float32))
        sender.send(pb_utils.InferenceResponse([tensor], parameters={"number": number}))
        time.sleep(pause)
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def add_count(stage: Stage, name: str = "count") -> None:
    """Decoupled: IN has the number of answers and the pause after each, in seconds."""
    stage.deploy(name, COUNT, methods=COUNT_METHODS, decoupled=True, max_batch_size=0)


PATIENT = """
note("begun")
until = time.monotonic() + 20
while time.monotonic() < until and not all(request.is_cancelled() for request in requests):
    time.sleep(0.005)
note("cancelled" if time.monotonic() < until else "not cancelled")
return [answer(request) for request in requests]
"""
"""Runs until all requests of the batch are cancelled."""


def load_on(stage: Stage, name: str) -> None:
    """Load a model that a function of `support.models` has written; the stage unloads it."""
    stage.names.append(name)
    assert load(stage.server, name) == (200, "")
