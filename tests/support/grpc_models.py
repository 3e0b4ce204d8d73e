"""Models for clients that run plans (`support.grpc_plans`): each returns IN as OUT."""

from pathlib import Path

from support.models import add_identity
from support.served import add_python

PATIENT = """
for request in requests:
    note("begun")
    limit = time.monotonic() + 30
    while not request.is_cancelled() and time.monotonic() < limit:
        time.sleep(0.005)
    note("cancelled" if request.is_cancelled() else "not cancelled")
error = pb_utils.TritonError("given up", pb_utils.TritonError.CANCELLED)
return [pb_utils.InferenceResponse(error=error) for _ in requests]
"""
"""Executes until its request is cancelled."""

MIRROR = "return [answer(request, **json.loads(request.parameters())) for request in requests]"

REPEAT = """
for request in requests:
    sender = request.get_response_sender()
    for number in range(json.loads(request.parameters())["count"]):
        sender.send(answer(request, number=number))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

ENDLESS = """
for request in requests:
    sender = request.get_response_sender()
    while not request.is_cancelled():
        sender.send(answer(request))
        time.sleep(0.005)
    note("cancelled")
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def write_models(repository: Path) -> None:
    """`ident`; `patient`, which executes until it is cancelled; `mirror`, which returns the parameters of its request; and
    decoupled `repeat` and `endless`."""
    add_identity(repository, "ident", dims="-1")
    add_python(repository, "patient", PATIENT)
    add_python(repository, "mirror", MIRROR)
    add_python(repository, "repeat", REPEAT, decoupled=True)
    add_python(repository, "endless", ENDLESS, decoupled=True)
