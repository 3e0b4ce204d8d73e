"""A location in a store: listing its files, and reading ranges of their bytes. Every call blocks.

Errors are TransientError (try again), ChangedError (list again) and FetchError (fail). Of the store library's error
texts, only parts that are known to be harmless are passed on.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import obstore
from obstore.exceptions import BaseError, InvalidPathError
from obstore.store import AzureStore, GCSStore, S3Store

from halimede.fetch.errors import ChangedError, FetchError
from halimede.fetch.http import HttpSource
from halimede.fetch.proxy import through_proxy
from halimede.fetch.retry import RetryPolicy
from halimede.fetch.store_errors import classify_text, raise_classified, said_by_proxy, server_in
from halimede.fetch.tree import MAX_FILES, RemoteFile
from halimede_spec.fetch_exit import FetchExit
from halimede_spec.fetch_plan import S3Defaults
from halimede_spec.uri import Scheme, Uri

PIECE_BYTES = 1 << 18
WHOLE_ANSWER = "1day"
"""No time limit for a response that makes progress; the limit for silence is much shorter."""
DEFAULT_REGION = "us-east-1"


class Source(Protocol):
    """One URI of a store. `is_ranged` means that reading may begin at any offset; otherwise only at 0."""

    @property
    def is_ranged(self) -> bool: ...

    def single(self) -> RemoteFile | None:
        """The file that the URI itself names, None if it is not a file."""

    def listing(self) -> list[RemoteFile]:
        """All files below the URI, at most MAX_FILES + 1 of them."""

    def read(self, file: RemoteFile, start: int, stop: int | None) -> Iterator[bytes]:
        """The bytes from `start` to before `stop`, in pieces. It may end early, so the caller must count."""


def open_source(
    uri: Uri,
    credentials: Mapping[str, str] | None,
    environment: Mapping[str, str],
    ca_bundle: bytes | None,
    s3: S3Defaults,
    retries: RetryPolicy,
) -> Source:
    """The source for a URI. Without credentials it uses the environment and workload identity."""
    if uri.scheme is Scheme.HTTP:
        return HttpSource(uri, credentials or {}, ca_bundle, retries.silence_secs)
    client: dict[str, Any] = {
        "connect_timeout": f"{retries.connect_secs * 1000:.0f}ms",
        "read_timeout": f"{retries.silence_secs * 1000:.0f}ms",
        "timeout": WHOLE_ANSWER,
    }
    if ca_bundle is not None:
        client["root_certificate"] = ca_bundle
    with store_errors_converted(uri.display):
        return StoreSource(uri, _store(uri, credentials, environment, s3, client))


# Any: the stores' own options.
def _store(
    uri: Uri,
    credentials: Mapping[str, str] | None,
    environment: Mapping[str, str],
    s3: S3Defaults,
    client: dict[str, Any],
) -> S3Store | GCSStore | AzureStore:
    # The library must not retry: `RetryPolicy` counts, times and logs all tries.
    retry: Any = {"max_retries": 0}
    known = environment if credentials is None else credentials
    options: dict[str, Any]
    match uri.scheme:
        case Scheme.S3:
            endpoint = uri.address or known.get("AWS_ENDPOINT_URL_S3") or known.get("AWS_ENDPOINT_URL") or s3.endpoint
            region = known.get("AWS_REGION") or known.get("AWS_DEFAULT_REGION") or s3.region or DEFAULT_REGION
            options = {"region": region}
            if endpoint is not None:
                options["endpoint"] = endpoint
                client["allow_http"] = endpoint.startswith("http://")
            if credentials is not None and "AWS_ACCESS_KEY_ID" in credentials:
                # A provider instead of options, because the library would mix options with the environment.
                options["credential_provider"] = _aws_provider(credentials)
            elif credentials is not None or not _has_aws_identity(environment):
                options["skip_signature"] = True
            return S3Store(uri.container, client_options=client, retry_config=retry, **options)  # type: ignore[arg-type] # plain dicts
        case Scheme.GS:
            key = (credentials or {}).get("GOOGLE_APPLICATION_CREDENTIALS_JSON")
            options = {"service_account_key": key} if key else {}
            if key and (endpoint := _endpoint_of(key)):
                client["allow_http"] = endpoint.startswith("http://")
            return GCSStore(uri.container, client_options=client, retry_config=retry, **options)  # type: ignore[arg-type] # as above
        case _:
            options = {name: known[key] for key, name in _AZURE_OPTIONS if known.get(key)}
            if uri.account:
                options["account_name"] = uri.account
            if endpoint := environment.get("AZURE_ENDPOINT"):
                client["allow_http"] = endpoint.startswith("http://")
            return AzureStore(uri.container, client_options=client, retry_config=retry, **options)  # type: ignore[arg-type] # as above


def _endpoint_of(service_account: str) -> str:
    """The endpoint of a service account for another server than Google's."""
    try:
        return str(json.loads(service_account).get("gcs_base_url", ""))
    except (ValueError, AttributeError):
        raise FetchError(FetchExit.AUTH, "GOOGLE_APPLICATION_CREDENTIALS_JSON holds no JSON object") from None


_AZURE_OPTIONS = (
    ("AZURE_STORAGE_ACCOUNT", "account_name"),
    ("AZURE_STORAGE_KEY", "account_key"),
    ("AZURE_STORAGE_SAS_TOKEN", "sas_key"),
)


def _aws_provider(credentials: Mapping[str, str]) -> Any:
    def provide() -> dict[str, Any]:
        return {
            "access_key_id": credentials["AWS_ACCESS_KEY_ID"],
            "secret_access_key": credentials.get("AWS_SECRET_ACCESS_KEY", ""),
            "token": credentials.get("AWS_SESSION_TOKEN"),
            "expires_at": None,
        }

    return provide


_AWS_IDENTITY = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    # The machine's role is used only on request: elsewhere, waiting for its server would cost a minute.
    "AWS_METADATA_ENDPOINT",
)


def _has_aws_identity(environment: Mapping[str, str]) -> bool:
    return any(environment.get(name) for name in _AWS_IDENTITY)


class StoreSource:
    """A bucket or container, read with the object store library."""

    is_ranged = True

    def __init__(self, uri: Uri, store: S3Store | GCSStore | AzureStore) -> None:
        self._uri = uri
        self._store = store
        self._endpoint = str(store.config.get("endpoint", ""))

    def single(self) -> RemoteFile | None:
        if self._uri.is_folder:
            return None
        try:
            with store_errors_converted(self._uri.display, self._endpoint):
                meta = obstore.head(self._store, self._uri.path)
        except FetchError:
            # The listing decides. A refused HEAD has no body with the reason, and a store that does not allow listing
            # answers 403 for an object that does not exist.
            return None
        return RemoteFile(self._uri.name, meta["size"], meta["e_tag"] or "")

    def listing(self) -> list[RemoteFile]:
        prefix = self._uri.path
        found: list[RemoteFile] = []
        with store_errors_converted(self._uri.display, self._endpoint):
            for batch in obstore.list(self._store, prefix=prefix or None, chunk_size=1000):
                for meta in batch:
                    path = meta["path"].removeprefix(prefix).removeprefix("/")
                    found.append(RemoteFile(path, meta["size"], meta["e_tag"] or ""))
                if len(found) > MAX_FILES:
                    break
        return found

    def read(self, file: RemoteFile, start: int, stop: int | None) -> Iterator[bytes]:
        options: Any = {"range": (start, stop) if stop is not None else {"offset": start}}
        if file.validator:
            # Azure lists tags without the quotes that a condition requires.
            options["if_match"] = f'"{_plain(file.validator)}"'
        with store_errors_converted(f"{self._uri.display.rstrip('/')}/{file.path}", self._endpoint):
            result = obstore.get(self._store, self._key(file), options=options)
            meta = result.meta
            if meta["size"] != file.size or (file.validator and _plain(meta["e_tag"] or "") != _plain(file.validator)):
                raise ChangedError
            yield from result.stream(min_chunk_size=PIECE_BYTES)

    def _key(self, file: RemoteFile) -> str:
        if not self._uri.is_folder and file.path == self._uri.name:
            return self._uri.path
        return f"{self._uri.path}/{file.path}" if self._uri.path else file.path


def _plain(tag: str) -> str:
    return tag.removeprefix("W/").strip('"')


@contextmanager
def store_errors_converted(where: str, endpoint: str = "") -> Iterator[None]:
    """Convert the library's exceptions inside the block to the errors of `fetch.errors`."""
    try:
        yield
    except InvalidPathError as error:
        key = _key_of(str(error))
        raise FetchError(FetchExit.NOT_A_MODEL, f"{where} has objects that cannot be files: {key}") from None
    except (BaseError, OSError) as error:
        text = str(error)
        classified = classify_text(type(error).__name__, text, endpoint)
        if by := through_proxy(server_in(text) or endpoint):
            by += said_by_proxy(text)
    else:
        return
    raise_classified(classified, where, by)


def _key_of(text: str) -> str:
    """The path that the library refuses as a key, in quotes, and its reason."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text.partition("\n\nDebug")[0])[:300]
