"""Which nodes a pod may run on: node selector, required node affinity and tolerations, as in the scheduler."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from halimede_operator.core.names import canonical_json, hash_of
from halimede_operator.core.reading import at, objects_at, text_at
from halimede_operator.core.spec.types import Json

Labels = Mapping[str, str]
Term = tuple[Json, ...]
"""Expressions over labels, `{key, operator, values}`, all of which must be true."""


@dataclass(frozen=True, slots=True)
class Taint:
    key: str
    value: str
    effect: str


MAX_PARTS = 100
"""Labels, terms, expressions, values and tolerations of one pod that are evaluated, so that no pod delays decisions
about others."""


@dataclass(frozen=True, slots=True)
class NodeFilter:
    """The conditions of one pod."""

    selector: Labels
    terms: tuple[Json, ...]
    """nodeSelectorTerms of the required node affinity; one of them must be true. Empty: no condition."""
    tolerations: tuple[Json, ...]
    identity: str
    """Equal for equal conditions, so that results can be kept by it."""
    is_too_large: bool = False
    """It has more than MAX_PARTS, which are not kept; then it allows no node."""

    @classmethod
    def of(cls, selector: Labels, terms: Sequence[Json], tolerations: Sequence[Json]) -> "NodeFilter":
        if _parts(terms) + len(selector) + len(tolerations) > MAX_PARTS:
            return cls({}, (), (), "too large", is_too_large=True)
        identity = hash_of(canonical_json([selector, terms, tolerations]), 32)
        return cls(selector, tuple(terms), tuple(tolerations), identity)

    def obstacle(self, name: str, labels: Labels, taints: Iterable[Taint]) -> str:
        """Why the pod may not run on this node; "" if it may."""
        if self.is_too_large:
            return f"cannot be checked, because selector, affinity and tolerations have more than {MAX_PARTS} parts"
        if any(labels.get(key) != value for key, value in self.selector.items()):
            return "does not match the node selector"
        if self.terms and not any(_is_true(term, name, labels) for term in self.terms):
            return "does not match the node affinity"
        for taint in taints:
            if taint.effect != "PreferNoSchedule" and not any(_tolerates(each, taint) for each in self.tolerations):
                return f"has the taint {taint.key}"
        return ""


def filter_of(pod: object) -> NodeFilter:
    """The conditions of a pod or of a pod template, of any shape."""
    selector = at(pod, "spec", "nodeSelector")
    required = at(pod, "spec", "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    return NodeFilter.of(
        {str(key): str(value) for key, value in selector.items()} if isinstance(selector, Mapping) else {},
        objects_at(required, "nodeSelectorTerms"),
        objects_at(pod, "spec", "tolerations"),
    )


def _parts(terms: Sequence[Json]) -> int:
    expressions = [
        each for term in terms for name in ("matchExpressions", "matchFields") for each in objects_at(term, name)
    ]
    values = (at(each, "values") for each in expressions)
    return len(terms) + len(expressions) + sum(len(each) for each in values if isinstance(each, list))


def holds_for(term: Iterable[Json], labels: Labels) -> bool:
    """Whether all expressions are true for a node with these labels."""
    return all(_holds(each, labels) for each in term)


def failing(term: Iterable[Json], labels: Labels) -> list[Json]:
    """The expressions that are not true for a node with these labels."""
    return [each for each in term if not _holds(each, labels)]


def _is_true(term: Json, name: str, labels: Labels) -> bool:
    expressions, fields = objects_at(term, "matchExpressions"), objects_at(term, "matchFields")
    # An empty term matches no node.
    return bool(expressions or fields) and holds_for(expressions, labels) and holds_for(fields, {"metadata.name": name})


def _holds(expression: Json, labels: Labels) -> bool:
    given = at(expression, "values")
    values: Sequence[object] = given if isinstance(given, list | tuple) else ()
    found = labels.get(text_at(expression, "key"))
    match text_at(expression, "operator"):
        case "In":
            return found is not None and found in values
        case "NotIn":
            return found not in values
        case "Exists":
            return found is not None
        case "DoesNotExist":
            return found is None
        case "Gt":
            return (compared := _difference(found, values)) is not None and compared > 0
        case "Lt":
            return (compared := _difference(found, values)) is not None and compared < 0
    return False


def _difference(found: str | None, values: Sequence[object]) -> int | None:
    try:
        return int(found or "") - int(str(values[0])) if len(values) == 1 else None
    except ValueError:
        return None


def _tolerates(toleration: Json, taint: Taint) -> bool:
    key, effect = text_at(toleration, "key"), text_at(toleration, "effect")
    if effect not in ("", taint.effect) or (key not in ("", taint.key)):
        return False
    if text_at(toleration, "operator") == "Exists":
        return True
    return key == taint.key and text_at(toleration, "value") == taint.value
