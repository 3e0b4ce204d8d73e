"""The tensors of one request in an ensemble, by scope.

A tensor is held until its last user in its scope has started, and is not copied. `RequestPlan` has the users of each
tensor and how often each is used; the scopes count this down. A user that waits for no further tensors is `ready`.
"""

from collections import deque
from enum import Enum, auto

from halimede.core.ensemble.graph import RequestPlan
from halimede.core.ensemble.sequence import SequenceParameters
from halimede.core.types import Tensor


class Absent(Enum):
    """Why a tensor is absent: no step returned it, or its step was skipped."""

    MISSING = auto()
    SKIPPED = auto()


class Scope:
    """The tensors of one scope and what waits for them. `waits` and `uses` count down from those of `RequestPlan`.

    `call` is the call whose answer opened the scope, and `is_owed` is whether that answer is to be acknowledged.
    `children` counts the scopes that the scope's own decoupled step opened and that are not over; no further ones are
    opened if `has_all_children`.
    """

    __slots__ = (
        "call",
        "calls",
        "children",
        "has_all_children",
        "is_over",
        "is_owed",
        "number",
        "parent",
        "sequences",
        "undecided",
        "uses",
        "values",
        "waits",
    )

    def __init__(
        self, plan: RequestPlan, number: int, parent: "Scope | None" = None, call: int = 0, is_owed: bool = False
    ) -> None:
        self.number = number
        self.parent = parent
        self.call = call
        self.is_owed = is_owed
        self.values: dict[str, Tensor | Absent] = {}
        # Only of tensors whose sequence parameters differ from the request's.
        self.sequences: dict[str, SequenceParameters] = {}
        self.uses = dict(plan.uses.get(number, {}))
        self.waits = list(plan.waits)
        self.undecided = plan.undecided.get(number, 0)
        self.calls = 0
        self.children = 0
        self.has_all_children = False
        self.is_over = False


class Scopes:
    """All scopes of a run that are not over, and the users that are ready, in the order in which they became so."""

    __slots__ = ("_open", "_plan", "ready", "root")

    def __init__(self, plan: RequestPlan) -> None:
        self._plan = plan
        self.root = Scope(plan, 0)
        # The scopes that answers of decoupled steps opened, by number.
        self._open: dict[int, dict[Scope, None]] = {}
        self.ready: deque[tuple[int, Scope]] = deque()

    @property
    def held(self) -> list[str]:
        """The names of the tensors that are held, once per scope."""
        scopes = [self.root, *(scope for scopes in self._open.values() for scope in scopes)]
        return [name for scope in scopes for name, value in scope.values.items() if isinstance(value, Tensor)]

    def put(
        self, scope: Scope, tensor: str, value: Tensor | Absent, sequence: SequenceParameters | None = None
    ) -> None:
        """Keep a tensor, or why it is absent, and count down the users that wait for it."""
        plan = self._plan
        users = plan.users.get(tensor)
        if users is None or scope.uses[tensor] == 0:
            return
        scope.values[tensor] = value
        if sequence is not None:
            scope.sequences[tensor] = sequence
        waits, own = scope.waits, scope.number
        for user in users:
            number = plan.scopes[user]
            if number == own:
                waits[user] -= 1
                if not waits[user]:
                    self.ready.append((user, scope))
            else:
                for inner in self._open.get(number, ()):
                    self._count_down(inner, user)

    def open(self, parent: Scope, number: int, call: int = 0, *, is_owed: bool = False) -> Scope:
        """A new scope within `parent`, for an answer of `call`."""
        inner = Scope(self._plan, number, parent, call, is_owed)
        parent.children += 1
        self._open.setdefault(number, {})[inner] = None
        for tensor, users in self._plan.shared.get(number, {}).items():
            if tensor in self.root.values:
                for user in users:
                    self._count_down(inner, user)
        return inner

    def home(self, scope: Scope, tensor: str) -> Scope:
        """The scope that has a tensor which is used in `scope`."""
        return scope if self._plan.scope_of[tensor] == scope.number else self.root

    def use(self, scope: Scope, tensor: str) -> None:
        """Count one use in `scope`. Uses in inner scopes are counted as one, when the last inner scope is over."""
        if self._plan.scope_of[tensor] == scope.number:
            self._release(scope, tensor)

    def release_shared(self, scope: Scope) -> None:
        """Release the tensors that only inner scopes used, if none of these is open and none will be opened."""
        if scope is self.root and scope.has_all_children and scope.children == 0:
            for tensor in self._plan.inherited:
                self._release(scope, tensor)

    def close(self, scope: Scope) -> None:
        """Remove an inner scope that is over."""
        del self._open[scope.number][scope]

    def clear(self) -> list[Scope]:
        """Release every tensor and close every inner scope. The result is the scopes that were closed."""
        closed = [scope for scopes in self._open.values() for scope in scopes]
        for scope in (self.root, *closed):
            scope.values.clear()
        self._open.clear()
        self.ready.clear()
        return closed

    def _count_down(self, scope: Scope, user: int) -> None:
        scope.waits[user] -= 1
        if scope.waits[user] == 0:
            self.ready.append((user, scope))

    def _release(self, scope: Scope, tensor: str) -> None:
        scope.uses[tensor] -= 1
        if scope.uses[tensor] == 0:
            scope.values.pop(tensor, None)
