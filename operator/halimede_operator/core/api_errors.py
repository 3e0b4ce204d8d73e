"""What an error of the API server means for the caller, and how to report it to the author of a spec.

The HTTP status alone is not enough. A mistake inside `podTemplate` is a 500, the same as an outage. A request in a
namespace that is being deleted gets 403, the same as missing rights. So the table also matches the message. The first
matching row counts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Any

from halimede_operator.core.objects import map_key
from halimede_operator.core.reading import at, at_rest
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.pod_template import FETCH, SERVER
from halimede_operator.core.spec.quantities import quantity

# Any, in this module: JSON.


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of a refusal, as the API server lists it."""

    reason: str
    field: str = ""
    """`spec.ports[1].name`. The index refers to a list that only the API server has seen."""


class Meaning(Enum):
    """What an error means. The value is the reason in a status condition."""

    FORBIDDEN = "Forbidden"
    """The operator has no right to do it."""
    OVER_QUOTA = "QuotaExceeded"
    REFUSED = "ApplyRefused"
    """The object is invalid, or an admission rule forbids it."""
    PODS_REFUSED = "PodsRefused"
    """Pods of the object would be refused."""
    UNAVAILABLE = "FeatureUnavailable"
    """The cluster does not have the kind, or the operator was given no rights for it."""
    CONFLICT = "Conflict"
    """The object was changed by another write, or another object has the name."""
    TRANSIENT = "ApplyFailed"
    """The same request may succeed later."""
    NAMESPACE_TERMINATING = "NamespaceTerminating"
    """The namespace is being deleted, or no longer exists."""

    @property
    def is_refusal(self) -> bool:
        """Whether the same request is refused again until a user changes something."""
        return self in (
            Meaning.FORBIDDEN,
            Meaning.OVER_QUOTA,
            Meaning.REFUSED,
            Meaning.PODS_REFUSED,
            Meaning.UNAVAILABLE,
        )


@dataclass(frozen=True, slots=True)
class _Row:
    statuses: range | frozenset[int]
    pattern: re.Pattern[str] | None
    """Searched in the message followed by the reasons of its causes; None matches any message."""
    meaning: Meaning


def _row(statuses: range | set[int], pattern: str | None, meaning: Meaning) -> _Row:
    listed = statuses if isinstance(statuses, range) else frozenset(statuses)
    return _Row(listed, None if pattern is None else re.compile(pattern), meaning)


_EXCEEDED_QUOTA = r"\bis forbidden: exceeded quota: "
_NO_RIGHT = r"\bis forbidden: (User .+ )?cannot (\w+ resource|set blockOwnerDeletion|set an ownerRef)\b"
"""This and the one above are with the words before, because the message of a webhook may have any words."""

_UNKNOWN_OWNER = r"\bcannot find RESTMapping\b"
"""The admission plugin that checks owners does not know a new CustomResourceDefinition for up to 30 s."""

_ROWS = (
    _row({403}, _UNKNOWN_OWNER, Meaning.TRANSIENT),
    _row({403, 409}, r"\bis being terminated\b|\bNamespaceTerminating\b", Meaning.NAMESPACE_TERMINATING),
    _row({404}, r'^namespaces "[^"]*" not found', Meaning.NAMESPACE_TERMINATING),
    _row({403}, _EXCEEDED_QUOTA, Meaning.OVER_QUOTA),
    _row({403}, _NO_RIGHT, Meaning.FORBIDDEN),
    _row({409}, None, Meaning.CONFLICT),
    _row({401, 408, 425, 429}, None, Meaning.TRANSIENT),
    _row(range(400, 500), None, Meaning.REFUSED),
    # Server-side apply cannot convert the object to its kind's type. The API server does not report this as the
    # client's mistake.
    _row({500}, r"^failed to (create typed|convert) ", Meaning.REFUSED),
    _row({500}, r"\brequest is too large\b|\blarger than max\b", Meaning.REFUSED),
)


def meaning_of(status: int, message: str, causes: Sequence[Cause] = ()) -> Meaning:
    """Classify an error. status: HTTP's number, 0 if there was no answer."""
    searched = " ".join((message, *(cause.reason for cause in causes)))
    fitting = (row for row in _ROWS if status in row.statuses and (row.pattern is None or row.pattern.search(searched)))
    return next((row.meaning for row in fitting), Meaning.TRANSIENT)


def is_owner_unknown(message: str) -> bool:
    """Whether a child was refused because its owner's CustomResourceDefinition is new."""
    return re.search(_UNKNOWN_OWNER, message) is not None


def is_over_quota(message: str) -> bool:
    """Whether a message about a refused object says that a ResourceQuota is used up."""
    return re.search(_EXCEEDED_QUOTA, message) is not None


def is_of_webhook(message: str) -> bool:
    """Whether an admission webhook refused an object, or could not be asked about it."""
    return re.search(r'\b(admission|failed calling) webhook "', message) is not None


def is_dry_run_unsupported(message: str) -> bool:
    """Whether a dry run was refused because an admission webhook has side effects."""
    return re.search(r'^admission webhook "[^"]*" does not support dry run$', message) is not None


_AMOUNTS = re.compile(r"\brequested: (?P<requested>[^ ]+), used: (?P<used>[^ ]+), limited: (?P<limited>[^ ]+)$")


@dataclass(frozen=True, slots=True)
class Excess:
    """What a used-up quota has of one resource, in its unit."""

    requested: Fraction
    used: Fraction
    limited: Fraction


def excesses_of(message: str) -> Mapping[str, Excess]:
    """What an object asks for, of the resources of which a quota has too little, by name: `limits.memory`, `pods`.

    Empty for every other refusal, and if an amount cannot be read.
    """
    amounts = _AMOUNTS.search(message)
    if not is_over_quota(message) or amounts is None:
        return {}
    requested, used, limited = (
        {name: quantity(value) for name, _, value in (each.partition("=") for each in amounts[part].split(","))}
        for part in ("requested", "used", "limited")
    )
    found: dict[str, Excess] = {}
    for name in requested:
        asked, taken, whole = requested[name], used.get(name), limited.get(name)
        if asked is None or taken is None or whole is None:
            return {}
        found[name] = Excess(asked, taken, whole)
    return found


_PREFIX = re.compile(
    r"^failed to [a-z ]+ \([^)]*\)[a-z ]*: (?:unable to convert unstructured object to [\w./]+, Kind=\w+: )?"
    r'|^\w+(?:\.[\w.]+)? "[^"]*" is invalid: '
)
_TEMPLATE_PATH = re.compile(
    r"(?<![\w.])\.?spec\.template((?:\.[A-Za-z]\w*|\[[^\]]*\])*)(?P<missing>(?=: Required value))?"
)
_BEHAVIOR_PATH = re.compile(r"(?<![\w.])\.?spec\.behavior\b")
_RESOURCES_PATH = re.compile(r"\.spec\.(?P<list>initContainers|containers)\[(?P<item>[^\]]*)\]\.(?P<field>resources.*)")
_STEP = re.compile(r"\.(?P<name>\w+)|\[(?P<item>[^\]]*)\]")
_KEY = re.compile(r'(\w+)=(?:"([^"]*)"|([^,]*))')


def message_for_author(status: int, message: str, wanted: Object, spec: object) -> str:
    """The API server's message about a child, for the author of the object.

    Paths within the Deployment's pod template become paths in the object's `spec`, if the field comes from there.
    status: HTTP's number, 0 if there was no answer. wanted: the child.
    """
    if not status:
        return f"no answer from the API server: {at_rest(message)}"
    template = at(wanted, "spec", "template")
    found = _PREFIX.sub("", message) or message

    def instead(match: re.Match[str]) -> str:
        path = match[1]
        found = _in_spec(path, template, spec, is_missing=match["missing"] is not None)
        return found or _in_resources(path, template, spec) or match[0]

    if wanted.get("kind") == "HorizontalPodAutoscaler" and at(spec, "autoscaling", "behavior") is not None:
        found = _BEHAVIOR_PATH.sub("spec.autoscaling.behavior", found)
    return at_rest(_TEMPLATE_PATH.sub(instead, found))


def _in_spec(path: str, template: object, spec: object, *, is_missing: bool) -> str | None:
    """The path in the object's spec of the field at `path` below the pod template; None if the spec does not have it.

    is_missing: the path's last field does not exist.
    """
    steps: list[str | _Key | _Item] = []
    value: Any = template
    for step in _STEP.finditer(path):
        name, item = step["name"], step["item"]
        if name is not None:
            steps.append(name)
            value = at(value, name)
        elif isinstance(value, Mapping):
            steps.append(_Key(item))
            value = value.get(item)
        else:
            value = _item(value, item)
            steps.append(_Item(str(steps[-1]) if steps else "", value))
    sources: list[tuple[str, object, int]] = [("spec.podTemplate", at(spec, "podTemplate"), 0)]
    if steps[:2] == ["spec", "affinity"]:
        sources.append(("spec.scheduling.affinity", at(spec, "scheduling", "affinity"), 2))
    if steps[3:4] == ["env"]:
        sources.append(("spec.env", at(spec, "env"), 4))
    there = steps[:-1] if is_missing else steps
    for root, source, skipped in sources:
        texts = _reach(source, there[skipped:])
        if texts and len(texts) + skipped == len(there):
            return root + "".join(texts) + (_text(steps[-1]) if is_missing else "")
    return None


def _in_resources(path: str, template: object, spec: object) -> str | None:
    """The path in `spec.resources` of the field at `path` below the pod template; None if it does not come from there.

    What is missing there, such as a limit beside a request, is in no other place either.
    """
    match = _RESOURCES_PATH.fullmatch(path)
    if match is None or "nvidia.com/" in path or not at(spec, "resources"):
        return None
    container = _item(at(template, "spec", match["list"]), match["item"])
    return f"spec.{match['field']}" if at(container, "name") in (FETCH, SERVER) else None


@dataclass(frozen=True, slots=True)
class _Key:
    """A key of the user's choice, such as that of an annotation."""

    name: str


@dataclass(frozen=True, slots=True)
class _Item:
    field: str
    """The list's name."""
    value: Any
    """None if the template has no such item."""


def _reach(value: Any, steps: Sequence[str | _Key | _Item]) -> list[str]:
    """Follow the steps until the value lacks one; return the followed steps as text."""
    texts: list[str] = []
    for step in steps:
        if isinstance(step, str | _Key):
            name = step if isinstance(step, str) else step.name
            if not isinstance(value, Mapping) or name not in value:
                break
            value = value[name]
            texts.append(_text(step))
        else:
            key = map_key(step.field, step.value)
            items = value if isinstance(value, list) else []
            same = (
                n for n, item in enumerate(items) if item == step.value or (key and map_key(step.field, item) == key)
            )
            if (index := next(same, None)) is None:
                break
            value = items[index]
            texts.append(f"[{index if key is None or key[0] is None else key[0]}]")
    return texts


def _text(step: str | _Key | _Item) -> str:
    return f"[{step.name}]" if isinstance(step, _Key) else f".{step}"


def _item(value: Any, item: str) -> Any:
    """The item that `[0]` or `[name="server"]` selects; None if there is none."""
    if not isinstance(value, list):
        return None
    if item.isdecimal() and item.isascii():
        return value[int(item)] if int(item) < len(value) else None
    keys = {key: text or bare for key, text, bare in _KEY.findall(item)}
    fitting = (each for each in value if all(str(at(each, key)) == text for key, text in keys.items()))
    return next(fitting, None) if keys else None
