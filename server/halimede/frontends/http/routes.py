"""The routes of the inference protocol: paths and methods. Pure."""

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from urllib.parse import unquote

import httptools

from halimede.core.types import ApiCategory


class Action(Enum):
    """The actions, each with the category by which it can be restricted."""

    SERVER_METADATA = "server_metadata", ApiCategory.METADATA
    SERVER_LIVE = "server_live", ApiCategory.HEALTH
    SERVER_READY = "server_ready", ApiCategory.HEALTH
    MODEL_METADATA = "model_metadata", ApiCategory.METADATA
    MODEL_READY = "model_ready", ApiCategory.HEALTH
    MODEL_CONFIG = "model_config", ApiCategory.MODEL_CONFIG
    MODEL_STATISTICS = "model_statistics", ApiCategory.STATISTICS
    INFER = "infer", ApiCategory.INFERENCE
    GENERATE = "generate", ApiCategory.INFERENCE
    GENERATE_STREAM = "generate_stream", ApiCategory.INFERENCE
    REPOSITORY_INDEX = "repository_index", ApiCategory.MODEL_REPOSITORY
    DEVICES = "devices", ApiCategory.MODEL_REPOSITORY
    MODEL_LOAD = "model_load", ApiCategory.MODEL_REPOSITORY
    MODEL_UNLOAD = "model_unload", ApiCategory.MODEL_REPOSITORY
    SYSTEM_SHARED_MEMORY = "system_shared_memory", ApiCategory.SHARED_MEMORY
    CUDA_SHARED_MEMORY = "cuda_shared_memory", ApiCategory.SHARED_MEMORY
    TRACE = "trace", ApiCategory.TRACE
    LOGGING = "logging", ApiCategory.LOGGING

    def __init__(self, label: str, category: ApiCategory) -> None:
        self.label = label
        self.category = category


@dataclass(frozen=True, slots=True)
class Route:
    """The action of a path. `methods` are the accepted ones.

    `version` is decimal without leading zeros, "" where the path has none. `repository` is the repository in the path,
    `region` the region of shared memory and `verb` its operation.
    """

    action: Action
    methods: tuple[bytes, ...]
    model: str = ""
    version: str = ""
    repository: str = ""
    region: str = ""
    verb: str = ""


_GET = (b"GET",)
_POST = (b"POST",)
_GET_POST = (b"GET", b"POST")

_MODEL_ROUTES = {
    "ready": (Action.MODEL_READY, _GET),
    "config": (Action.MODEL_CONFIG, _GET),
    "stats": (Action.MODEL_STATISTICS, _GET),
    "infer": (Action.INFER, _POST),
    "generate": (Action.GENERATE, _POST),
    "generate_stream": (Action.GENERATE_STREAM, _POST),
}
_REPOSITORY_ROUTES = {"load": Action.MODEL_LOAD, "unload": Action.MODEL_UNLOAD}
_SHARED_MEMORY = {"systemsharedmemory": Action.SYSTEM_SHARED_MEMORY, "cudasharedmemory": Action.CUDA_SHARED_MEMORY}
_SHARED_MEMORY_ROUTES = {"status": _GET, "register": _POST, "unregister": _POST}

_CACHED_TARGET_BYTES = 256


def resolve(target: bytes) -> Route | None:
    """The route of a request target, None when it is unknown. A query is ignored, names are percent-decoded."""
    # Long targets are rare, and a client could fill memory with 1,024 of them.
    return _resolve_cached(target) if len(target) <= _CACHED_TARGET_BYTES else _resolve(target)


def is_inference(target: bytes) -> bool:
    """Whether a request target is that of an inference, and not of a control call."""
    route = resolve(target)
    return route is not None and route.action.category is ApiCategory.INFERENCE


def path_of(target: bytes) -> bytes:
    """The path of a request target in origin form or absolute form."""
    if not target.startswith(b"/"):
        try:
            target = httptools.parse_url(target).path or b"/"
        except httptools.HttpParserInvalidURLError:
            return b""
    return target.partition(b"?")[0]


def _resolve(target: bytes) -> Route | None:
    # Only names are decoded, after the split, so that %2F is not a slash. Other segments are compared as they are.
    match path_of(target).decode("latin-1").split("/")[1:]:
        case ["v2"]:
            return Route(Action.SERVER_METADATA, _GET)
        case ["v2", "health", "live"]:
            return Route(Action.SERVER_LIVE, _GET)
        case ["v2", "health", "ready"]:
            return Route(Action.SERVER_READY, _GET)
        case ["v2", "models", *rest]:
            return _resolve_model(rest)
        case ["v2", "repository", *rest]:
            return _resolve_repository(rest)
        case ["v2", "halimede", "devices"]:
            return Route(Action.DEVICES, _GET)
        case ["v2", "logging"]:
            return Route(Action.LOGGING, _GET_POST)
        case ["v2", "trace", "setting"]:
            return Route(Action.TRACE, _GET_POST)
        case ["v2", memory, verb] if memory in _SHARED_MEMORY and verb in _SHARED_MEMORY_ROUTES:
            return Route(_SHARED_MEMORY[memory], _SHARED_MEMORY_ROUTES[verb], verb=verb)
        case ["v2", memory, "region", region, verb] if (
            memory in _SHARED_MEMORY and region and verb in _SHARED_MEMORY_ROUTES
        ):
            return Route(_SHARED_MEMORY[memory], _SHARED_MEMORY_ROUTES[verb], region=unquote(region), verb=verb)
    return None


_resolve_cached = lru_cache(maxsize=1024)(_resolve)


def _resolve_model(rest: list[str]) -> Route | None:
    """The route after `/v2/models/`. `stats` takes precedence: a model of that name is not reachable, as in Triton."""
    match rest:
        case ["stats"]:
            return Route(Action.MODEL_STATISTICS, _GET)
        case ["", *_]:
            return None
        case [name]:
            return Route(Action.MODEL_METADATA, _GET, unquote(name))
        case [name, "versions", version] if _is_version(version):
            return Route(Action.MODEL_METADATA, _GET, unquote(name), _normal(version))
        case [name, "trace", "setting"]:
            return Route(Action.TRACE, _GET_POST, unquote(name))
        case [name, verb]:
            return _resolve_verb(name, "", verb)
        case [name, "versions", version, verb] if _is_version(version):
            return _resolve_verb(name, _normal(version), verb)
    return None


def _resolve_verb(name: str, version: str, verb: str) -> Route | None:
    if verb not in _MODEL_ROUTES:
        return None
    action, methods = _MODEL_ROUTES[verb]
    return Route(action, methods, unquote(name), version)


def _resolve_repository(rest: list[str]) -> Route | None:
    """The route after `/v2/repository/`, where the name of a repository may come first."""
    match rest:
        case ["index"]:
            return Route(Action.REPOSITORY_INDEX, _POST)
        case ["models", name, verb] if name and verb in _REPOSITORY_ROUTES:
            return Route(_REPOSITORY_ROUTES[verb], _POST, unquote(name))
        case [repository, "index"] if repository:
            return Route(Action.REPOSITORY_INDEX, _POST, repository=unquote(repository))
        case [repository, "models", name, verb] if repository and name and verb in _REPOSITORY_ROUTES:
            return Route(_REPOSITORY_ROUTES[verb], _POST, unquote(name), repository=unquote(repository))
    return None


def _is_version(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _normal(version: str) -> str:
    return version.lstrip("0") or "0"
