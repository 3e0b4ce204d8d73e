"""Runs of ensembles that a test drives step by step."""

from dataclasses import dataclass, field

from halimede.core.ensemble.graph import Graph
from halimede.core.ensemble.run import CallStep, EnsembleRun, GiveAnswer, RunAction
from halimede.core.types import ErrorCode, InferenceError, InferenceRequest, InferenceResponse, Tensor
from support.graphs import graph, model, tensor

A = model("a")


B = model("b")


C = model("c")


TWO = model("two", inputs=("IN", "IN2"))


OPTIONAL = model("optional", inputs=("IN", "IN2?"))


PAIR = model("pair", outputs=("OUT", "OUT2"))


MANY = model("many", decoupled=True)


MORE = model("more", decoupled=True)


CHAIN = graph([(A, {"IN": "x"}, {"OUT": "m"}), (B, {"IN": "m"}, {"OUT": "y"})])


FORK = graph(
    [
        (A, {"IN": "x"}, {"OUT": "m"}),
        (B, {"IN": "x"}, {"OUT": "n"}),
        (TWO, {"IN": "m", "IN2": "n"}, {"OUT": "y"}),
    ]
)


STREAM = graph([(MANY, {"IN": "x"}, {"OUT": "m"}), (A, {"IN": "m"}, {"OUT": "y"})])


@dataclass
class Player:
    """A run and all its actions, in order; `last` has the actions of the last event."""

    graph: Graph
    request: InferenceRequest = field(default_factory=lambda: InferenceRequest("e", inputs=[tensor("x")]))
    last: list[RunAction] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.run = EnsembleRun(self.graph, self.request)
        self.last = self.run.begin()

    def answer(self, call: int, *outputs: Tensor, final: bool = True, **more) -> list[RunAction]:
        self.last = self.run.on_response(call, InferenceResponse("m", "1", outputs=list(outputs), final=final, **more))
        return self.last

    def fail(self, call: int, message: str = "boom", *, final: bool = True) -> list[RunAction]:
        error = InferenceError(ErrorCode.NOT_FOUND, message)
        self.last = self.run.on_response(call, InferenceResponse("m", "1", error=error, final=final))
        return self.last

    @property
    def called(self) -> list[tuple[int, int]]:
        """Call and step of the last calls."""
        return [(action.call, action.step) for action in self.last if isinstance(action, CallStep)]

    @property
    def requests(self) -> list[InferenceRequest]:
        return [action.request for action in self.last if isinstance(action, CallStep)]

    @property
    def response(self) -> InferenceResponse:
        """The only answer among the last actions."""
        (answer,) = [action for action in self.last if isinstance(action, GiveAnswer)]
        return answer.response


def values(response: InferenceResponse) -> dict[str, float]:
    return {t.name: float(t.array().flat[0]) for t in response.outputs}
