"""The operator knows the server's flags: by the table in halimede_spec, which is written from the server's own."""

from hypothesis import given, settings

from halimede.commands.parse import parse
from halimede_operator.core.spec.arguments import OWNED
from halimede_operator.core.spec.types import Accelerator, AcceleratorType, Serving
from halimede_spec.server_flag_table import FLAGS
from halimede_spec.server_flags import flag_problem
from support.examples import drawn
from support.operator_children import pod_of, server_of
from support.operator_specs import model_spec, workload
from support.spec_tables import REGENERATE, flags

NAMES = tuple(FLAGS)
VALUES = (
    "",
    "=",
    "=true",
    "=0",
    "=1",
    "=8.5",
    "=all",
    "=json",
    "=a:b=c",
    "=1:0.5",
    "=-1",
    "=99999999999",
    "=a b",
    "=/x",
)


def test_the_table_is_that_of_the_server() -> None:
    assert dict(FLAGS) == flags(), f"run `{REGENERATE}`"


@settings(max_examples=300)
@given(drawn(lambda draws: draws.pick(NAMES) + draws.pick(VALUES), 3))
def test_the_server_refuses_what_the_operator_refuses(argument: str) -> None:
    if flag_problem(argument) is not None:
        assert parse([argument]).problems


def test_flags_that_the_operator_passes_cannot_be_given() -> None:
    everything = workload(
        serving=Serving(max_message_bytes=1 << 20),
        accelerator=Accelerator(AcceleratorType.GPU, count=2, process_per_device=True),
    )
    specs = (model_spec(workload=everything), model_spec(workload=workload(serving=Serving(grpc=False))))
    passed = {argument.partition("=")[0] for spec in specs for argument in server_of(pod_of(spec))["args"]}
    assert passed <= set(OWNED) <= set(FLAGS)
