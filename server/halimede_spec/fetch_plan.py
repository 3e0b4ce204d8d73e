"""The fetch plan: a JSON document that the operator writes and `halimede fetch` reads. Every problem is found at once.

The server decides which names and configurations are valid. The reader calls `ConfigRules` while it reads, so that
problems have the order of the document.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypedDict, TypeVar
from urllib.parse import urlsplit

from halimede_spec.uri import Scheme, Uri, UriError, parse_uri

VERSION = 1

FORMATS: Mapping[str, str] = {
    "onnx": "onnxruntime",
    "python": "python",
    "torch": "pytorch",
    "tensorflow": "tensorflow",
    "openvino": "openvino",
    "tensorrt": "tensorrt",
    "fil": "fil",
    "sklearn": "sklearn",
}
"""The formats of model files, each with its backend. The server knows the names of the files."""

DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)

C = TypeVar("C")
"""A model configuration, of the type that `ConfigRules.read_config` returns."""


# The document as it is written; absent values are left out.
class ModelDocument(TypedDict, total=False):
    name: str
    uri: str
    format: str
    digest: str
    config: Mapping[str, Any]  # Any: what JSON has
    credentials: str
    ca_bundle: str
    mount: str


class EnsembleDocument(TypedDict):
    name: str
    config: Mapping[str, Any]  # Any: as above


class S3Document(TypedDict, total=False):
    endpoint: str
    region: str
    credentials: str


class StoresDocument(TypedDict, total=False):
    s3: S3Document


class CacheDocument(TypedDict, total=False):
    path: str
    size_limit_bytes: int


class PlanDocument(TypedDict, total=False):
    version: int
    models: list[ModelDocument]
    ensembles: list[EnsembleDocument]
    stores: StoresDocument
    cache: CacheDocument


def write_plan(document: PlanDocument) -> str:
    """JSON with sorted keys and no spaces: equal plans have equal texts."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


# The document as it is read.
@dataclass(frozen=True, slots=True)
class PlannedModel(Generic[C]):
    """One model: its URI, and the name and format of its folder in the repository."""

    name: str
    uri: Uri
    format: str | None = None
    digest: str | None = None
    config: C | None = None
    credentials: str | None = None
    ca_bundle: str | None = None
    mount: str | None = None


@dataclass(frozen=True, slots=True)
class PlannedEnsemble(Generic[C]):
    name: str
    config: C


@dataclass(frozen=True, slots=True)
class S3Defaults:
    """Used for S3 URIs, unless the URI or its model's credentials have the value."""

    endpoint: str | None = None
    region: str | None = None
    credentials: str | None = None
    """A folder, for models without credentials. It may be missing or empty, like an optional Secret."""


@dataclass(frozen=True, slots=True)
class PlannedCache:
    path: str
    size_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class FetchPlan(Generic[C]):
    models: tuple[PlannedModel[C], ...] = ()
    ensembles: tuple[PlannedEnsemble[C], ...] = ()
    s3: S3Defaults = field(default_factory=S3Defaults)
    cache: PlannedCache | None = None


class ConfigRules(Protocol[C]):
    """The server's rules for names and configurations; problems are texts without a position."""

    def name_problem(self, name: str) -> str | None:
        """Why a model must not have this name; None for a valid one."""

    def read_config(self, document: dict[str, Any]) -> tuple[C | None, list[str]]:  # Any: what JSON has
        """The configuration and its problems; None for a document that cannot be read at all."""

    def name_of(self, config: C) -> str:
        """The model's name in the configuration; "" if it is not set."""

    def ensemble_problems(self, config: C, name: str) -> list[str]:
        """The problems of this configuration as one of an ensemble called `name`."""


def read_plan(text: bytes, rules: ConfigRules[C]) -> tuple[FetchPlan[C], list[str]]:
    """The plan and its problems. Do not use a plan that has problems."""
    reader = _Reader(rules)
    try:
        document = json.loads(text, object_pairs_hook=reader.without_doubles)
    except (ValueError, RecursionError) as error:
        # The message of a JSON error repeats no part of the text; that of an encoding error does.
        problem = str(error) if isinstance(error, json.JSONDecodeError) else "it is not UTF-8, or nested too deeply"
        return FetchPlan(), [f"the plan is not JSON: {problem}"]
    plan = reader.plan(document)
    return plan, reader.problems


# Any, from here on: a JSON value before its type is known.
class _Reader(Generic[C]):
    """Reads values at paths such as `models[0].uri`, and collects problems. A null value counts as absent."""

    def __init__(self, rules: ConfigRules[C]) -> None:
        self._rules = rules
        self.problems: list[str] = []

    def without_doubles(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            keys = [key for key, _ in pairs]
            self._add("", f"given twice: {', '.join(sorted({repr(key) for key in keys if keys.count(key) > 1}))}")
        return made

    def plan(self, document: Any) -> FetchPlan[C]:
        top = self._object(document, "", PlanDocument.__annotations__)
        version = top.get("version")
        if version is not None and (version is True or version != VERSION):
            self._add("version", f"expected {VERSION}")
        models = [self._model(each, at) for each, at in self._list(top.get("models"), "models")]
        ensembles = [self._ensemble(each, at) for each, at in self._list(top.get("ensembles"), "ensembles")]
        stores = self._object(top.get("stores"), "stores", StoresDocument.__annotations__)
        s3 = self._object(stores.get("s3"), "stores.s3", S3Document.__annotations__)
        endpoint = self._text(s3.get("endpoint"), "stores.s3.endpoint", _endpoint_problem)
        region = self._text(s3.get("region"), "stores.s3.region")
        credentials = self._text(s3.get("credentials"), "stores.s3.credentials", _folder_problem)
        plan = FetchPlan(
            tuple(each for each in models if each is not None),
            tuple(each for each in ensembles if each is not None),
            S3Defaults(endpoint, region, credentials),
            self._cache(top.get("cache")),
        )
        names = [each.name for each in plan.models] + [each.name for each in plan.ensembles]
        for name in sorted({each for each in names if names.count(each) > 1}):
            self._add("", f"the name {name!a} is given to two models")
        return plan

    def _model(self, value: Any, at: str) -> PlannedModel[C] | None:
        model = self._object(value, at, ModelDocument.__annotations__)
        name = self._name(model.get("name"), f"{at}.name")
        uri = self._uri(model.get("uri"), f"{at}.uri")
        form = self._text(model.get("format"), f"{at}.format", _format_problem)
        digest = self._text(model.get("digest"), f"{at}.digest", _digest_problem)
        config = self._config(model.get("config"), f"{at}.config")
        if config is not None and self._rules.name_of(config) not in ("", name):
            self._add(f"{at}.config.name", f"expected the model's name {name!a}, or no name")
        credentials = self._text(model.get("credentials"), f"{at}.credentials", _folder_problem)
        ca_bundle = self._text(model.get("ca_bundle"), f"{at}.ca_bundle", _folder_problem)
        mount = self._text(model.get("mount"), f"{at}.mount", _folder_problem)
        if uri is None or name is None:
            return None
        if uri.scheme is Scheme.PVC and mount is None:
            self._add(f"{at}.mount", f"{uri.display} needs the folder where the claim is mounted")
        if uri.scheme not in (Scheme.PVC, Scheme.FILE) and mount is not None:
            self._add(f"{at}.mount", f"{uri.display} is not mounted; leave it out")
        return PlannedModel(name, uri, form, digest, config, credentials, ca_bundle, mount)

    def _ensemble(self, value: Any, at: str) -> PlannedEnsemble[C] | None:
        ensemble = self._object(value, at, EnsembleDocument.__annotations__)
        name = self._name(ensemble.get("name"), f"{at}.name")
        config = self._config(ensemble.get("config"), f"{at}.config")
        if config is None:
            if ensemble.get("config") is None:
                self._add(f"{at}.config", "is missing")
            return None
        if name is None:
            return None
        self.problems += [f"{at}.config: {problem}" for problem in self._rules.ensemble_problems(config, name)]
        return PlannedEnsemble(name, config)

    def _cache(self, value: Any) -> PlannedCache | None:
        if value is None:
            return None
        cache = self._object(value, "cache", CacheDocument.__annotations__)
        path = self._text(cache.get("path"), "cache.path", _folder_problem)
        limit = cache.get("size_limit_bytes")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit <= 0):
            self._add("cache.size_limit_bytes", "expected a positive number of bytes")
            limit = None
        if path is None:
            if cache.get("path") is None:
                self._add("cache.path", "is missing")
            return None
        return PlannedCache(path, limit)

    def _name(self, value: Any, at: str) -> str | None:
        if value is None:
            self._add(at, "is missing")
        return self._text(value, at, self._rules.name_problem)

    def _uri(self, value: Any, at: str) -> Uri | None:
        if value is None:
            self._add(at, "is missing")
        text = self._text(value, at)
        try:
            return parse_uri(text) if text is not None else None
        except UriError as error:
            self._add(at, str(error))
            return None

    def _config(self, value: Any, at: str) -> C | None:
        if value is None:
            return None
        if not isinstance(value, dict):
            self._add(at, "expected an object, a model configuration")
            return None
        config, problems = self._rules.read_config(value)
        # Positions within the configuration are left out: they refer to a text that no user wrote.
        self.problems += [f"{at}: {problem}" for problem in problems]
        return config

    def _object(self, value: Any, at: str, keys: Collection[str]) -> dict[str, Any]:
        if value is None and at:
            return {}
        if not isinstance(value, dict):
            self._add(at, "expected an object")
            return {}
        for key in value:
            if key not in keys:
                self._add(f"{at}.{key!a}" if at else f"{key!a}", f"is unknown; use one of {', '.join(keys)}")
        return value

    def _list(self, value: Any, at: str) -> Iterable[tuple[Any, str]]:
        if value is None:
            return ()
        if not isinstance(value, list):
            self._add(at, "expected a list")
            return ()
        return [(each, f"{at}[{i}]") for i, each in enumerate(value)]

    def _text(self, value: Any, at: str, problem_of: Callable[[str], str | None] | None = None) -> str | None:
        if value is None:
            return None
        if not isinstance(value, str) or not value:
            self._add(at, "expected a string that is not empty")
            return None
        if problem_of is not None and (problem := problem_of(value)):
            self._add(at, problem)
            return None
        return value

    def _add(self, at: str, problem: str) -> None:
        self.problems.append(f"{at}: {problem}" if at else problem)


def _digest_problem(text: str) -> str | None:
    return None if DIGEST.fullmatch(text) else "expected sha256: and 64 of the digits 0 to 9 and a to f"


def _format_problem(text: str) -> str | None:
    return None if text in FORMATS else f"use one of {', '.join(FORMATS)}"


def _folder_problem(text: str) -> str | None:
    return None if text.startswith("/") and "\0" not in text else "expected an absolute path"


def _endpoint_problem(text: str) -> str | None:
    try:
        parts = urlsplit(text)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None
    except ValueError:
        is_valid = False
    return None if is_valid else "expected http:// or https:// and a host"
