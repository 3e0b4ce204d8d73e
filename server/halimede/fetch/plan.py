"""What is to be fetched: a JSON document, read into values. Pure; every problem of it is found at once."""

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import orjson

from halimede.core.config.model_config import ModelConfig
from halimede.core.config.read import ParsedConfig, read_json
from halimede.core.config.validate import apply_defaults, model_name_problem, validate
from halimede.core.repository.layout import NOT_MODELS, detect_backend
from halimede.core.types import InferenceError
from halimede.fetch.digest import digest_problem
from halimede.fetch.layout import FORMATS
from halimede.fetch.uri import Scheme, Uri, parse_uri

VERSION = 1


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """One model: where it is, and what its folder in the repository is to be."""

    name: str
    uri: Uri
    format: str | None = None
    digest: str | None = None
    config: ParsedConfig | None = None
    credentials: str | None = None
    ca_bundle: str | None = None
    mount: str | None = None


@dataclass(frozen=True, slots=True)
class EnsemblePlan:
    name: str
    config: ParsedConfig


@dataclass(frozen=True, slots=True)
class S3Defaults:
    """What is used where neither URI nor credentials say it."""

    endpoint: str | None = None
    region: str | None = None


@dataclass(frozen=True, slots=True)
class CachePlan:
    path: str
    size_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    models: tuple[ModelPlan, ...] = ()
    ensembles: tuple[EnsemblePlan, ...] = ()
    s3: S3Defaults = field(default_factory=S3Defaults)
    cache: CachePlan | None = None


def read_plan(text: bytes) -> tuple[Plan, list[str]]:
    """The plan and all that is wrong with it; with problems the plan is not to be used."""
    reader = _Reader()
    try:
        document = json.loads(text, object_pairs_hook=reader.without_doubles)
    except (ValueError, RecursionError) as error:
        # A JSON error repeats nothing of the text; one of its encoding would.
        said = str(error) if isinstance(error, json.JSONDecodeError) else "it is not UTF-8, or nested too deeply"
        return Plan(), [f"the plan is no JSON: {said}"]
    plan = reader.plan(document)
    return plan, reader.problems


# Any, from here on: what JSON gives before its type is known.
class _Reader:
    """Reads values at paths such as `models[0].uri`, and notes what is wrong. What is null is not there."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def without_doubles(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            keys = [key for key, _ in pairs]
            self._add("", f"given twice: {', '.join(sorted({repr(key) for key in keys if keys.count(key) > 1}))}")
        return made

    def plan(self, document: Any) -> Plan:
        top = self._object(document, "", ("version", "models", "ensembles", "stores", "cache"))
        version = top.get("version")
        if version is not None and (version is True or version != VERSION):
            self._add("version", f"right is {VERSION}")
        models = [self._model(each, at) for each, at in self._list(top.get("models"), "models")]
        ensembles = [self._ensemble(each, at) for each, at in self._list(top.get("ensembles"), "ensembles")]
        stores = self._object(top.get("stores"), "stores", ("s3",))
        s3 = self._object(stores.get("s3"), "stores.s3", ("endpoint", "region"))
        endpoint = self._text(s3.get("endpoint"), "stores.s3.endpoint", _endpoint_problem)
        region = self._text(s3.get("region"), "stores.s3.region")
        plan = Plan(
            tuple(each for each in models if each is not None),
            tuple(each for each in ensembles if each is not None),
            S3Defaults(endpoint, region),
            self._cache(top.get("cache")),
        )
        names = [each.name for each in plan.models] + [each.name for each in plan.ensembles]
        for name in sorted({each for each in names if names.count(each) > 1}):
            self._add("", f"the name {name!a} is given to two models")
        return plan

    def _model(self, value: Any, at: str) -> ModelPlan | None:
        keys = ("name", "uri", "format", "digest", "config", "credentials", "ca_bundle", "mount")
        model = self._object(value, at, keys)
        name = self._name(model.get("name"), f"{at}.name")
        uri = self._uri(model.get("uri"), f"{at}.uri")
        form = self._text(model.get("format"), f"{at}.format", _format_problem)
        digest = self._text(model.get("digest"), f"{at}.digest", digest_problem)
        config = self._config(model.get("config"), f"{at}.config")
        if config is not None and config.config.name not in ("", name):
            self._add(f"{at}.config.name", f"right is the model's name {name!a}, or none")
        credentials = self._text(model.get("credentials"), f"{at}.credentials", _folder_problem)
        ca_bundle = self._text(model.get("ca_bundle"), f"{at}.ca_bundle", _folder_problem)
        mount = self._text(model.get("mount"), f"{at}.mount", _folder_problem)
        if uri is None or name is None:
            return None
        if uri.scheme is Scheme.PVC and mount is None:
            self._add(f"{at}.mount", f"{uri.display} needs the folder where the claim is mounted")
        if uri.scheme not in (Scheme.PVC, Scheme.FILE) and mount is not None:
            self._add(f"{at}.mount", f"{uri.display} is not mounted; right is none")
        return ModelPlan(name, uri, form, digest, config, credentials, ca_bundle, mount)

    def _ensemble(self, value: Any, at: str) -> EnsemblePlan | None:
        ensemble = self._object(value, at, ("name", "config"))
        name = self._name(ensemble.get("name"), f"{at}.name")
        config = self._config(ensemble.get("config"), f"{at}.config")
        if config is None:
            if ensemble.get("config") is None:
                self._add(f"{at}.config", "is missing")
            return None
        if name is None:
            return None
        if config.config.ensemble_scheduling is None:
            self._add(f"{at}.config", "has no ensemble_scheduling")
        else:
            self.problems += [f"{at}.config: {problem}" for problem in _ensemble_problems(config.config, name)]
        return EnsemblePlan(name, config)

    def _cache(self, value: Any) -> CachePlan | None:
        if value is None:
            return None
        cache = self._object(value, "cache", ("path", "size_limit_bytes"))
        path = self._text(cache.get("path"), "cache.path", _folder_problem)
        limit = cache.get("size_limit_bytes")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit <= 0):
            self._add("cache.size_limit_bytes", "right is a number of bytes")
            limit = None
        if path is None:
            if cache.get("path") is None:
                self._add("cache.path", "is missing")
            return None
        return CachePlan(path, limit)

    def _name(self, value: Any, at: str) -> str | None:
        if value is None:
            self._add(at, "is missing")
        return self._text(value, at, _name_problem)

    def _uri(self, value: Any, at: str) -> Uri | None:
        if value is None:
            self._add(at, "is missing")
        text = self._text(value, at)
        try:
            return parse_uri(text) if text is not None else None
        except ValueError as error:
            self._add(at, str(error))
            return None

    def _config(self, value: Any, at: str) -> ParsedConfig | None:
        if value is None:
            return None
        if not isinstance(value, dict):
            self._add(at, "right is an object, a model configuration")
            return None
        try:
            parsed = read_json(orjson.dumps(value))
        except (TypeError, orjson.JSONEncodeError):
            self._add(at, "has a number or a text that no configuration can hold")
            return None
        # The places are those of our own text.
        self.problems += [f"{at}: {problem.message}" for problem in parsed.problems]
        return parsed

    def _object(self, value: Any, at: str, keys: Collection[str]) -> dict[str, Any]:
        if value is None and at:
            return {}
        if not isinstance(value, dict):
            self._add(at, "right is an object")
            return {}
        for key in value:
            if key not in keys:
                self._add(f"{at}.{key!a}" if at else f"{key!a}", f"is unknown; right are {', '.join(keys)}")
        return value

    def _list(self, value: Any, at: str) -> Iterable[tuple[Any, str]]:
        if value is None:
            return ()
        if not isinstance(value, list):
            self._add(at, "right is a list")
            return ()
        return [(each, f"{at}[{i}]") for i, each in enumerate(value)]

    def _text(self, value: Any, at: str, problem_of: Callable[[str], str | None] | None = None) -> str | None:
        if value is None:
            return None
        if not isinstance(value, str) or not value:
            self._add(at, "right is a text")
            return None
        if problem_of is not None and (problem := problem_of(value)):
            self._add(at, problem)
            return None
        return value

    def _add(self, at: str, problem: str) -> None:
        self.problems.append(f"{at}: {problem}" if at else problem)


def _ensemble_problems(config: ModelConfig, name: str) -> list[str]:
    """What the server would refuse: an ensemble has no files that could complete it."""
    try:
        complete = apply_defaults(detect_backend(config, name, ()), name)
    except InferenceError as error:
        return [error.message]
    return [problem.message for problem in validate(complete, name)]


def _name_problem(name: str) -> str | None:
    if name.startswith(".") or name in NOT_MODELS:
        return f"{name!a} is no model's name: a repository passes it over"
    return model_name_problem(name)


def _format_problem(text: str) -> str | None:
    return None if text in FORMATS else f"right are {', '.join(FORMATS)}"


def _folder_problem(text: str) -> str | None:
    return None if text.startswith("/") and "\0" not in text else "right is an absolute path"


def _endpoint_problem(text: str) -> str | None:
    try:
        parts = urlsplit(text)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None
    except ValueError:
        is_right = False
    return None if is_right else "right is http:// or https:// and a host"
