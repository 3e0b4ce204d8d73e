"""One S3 server for all tests; each test has its own bucket, and its own proxy that injects faults."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.stores import Fetch, Fetched, Moto, Proxy, WebServer, write_credentials


@pytest.fixture(scope="session")
def moto() -> Iterator[Moto]:
    with Moto() as running:
        yield running


@dataclass
class Store:
    """A bucket with `models/…` as its objects, and methods to fetch from it."""

    upstream: Moto | WebServer
    proxy: Proxy
    bucket: str
    folder: Path
    credentials: str

    def put(self, objects: dict[str, bytes], **options: Any) -> None:
        self.upstream.put(self.bucket, objects, **options)

    def uri(self, path: str) -> str:
        return f"s3://{self.bucket}/{path}"

    def plan(self, path: str = "digits/", *, name: str = "digits", cache: Any = None, **fields: Any) -> dict[str, Any]:
        model = {"name": name, "uri": self.uri(path), "credentials": self.credentials, **fields}
        return {"models": [model], "stores": {"s3": {"endpoint": self.proxy.url}}, "cache": cache}

    def fetching(
        self, path: str = "digits/", *, timeout: float = 60, process: str = "plan", into: str = "models", **fields: Any
    ) -> Fetch:
        return Fetch(self.folder, self.plan(path, **fields), timeout=timeout, name=process, into=into)

    def fetch(self, path: str = "digits/", **fields: Any) -> Fetched:
        return self.fetching(path, **fields).run()

    @property
    def models(self) -> Path:
        return self.folder / "models"

    def gets(self, key: str) -> int:
        return len(self.proxy.gets(f"/{self.bucket}/{key}"))

    def sent(self, key: str) -> int:
        return self.proxy.sent.get(f"/{self.bucket}/{key}", 0)


@pytest.fixture
def store(moto: Moto, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Store]:
    bucket = re.sub("[^a-z0-9]+", "-", request.node.name.lower())[:50].strip("-") + f"-{os.urandom(3).hex()}"
    with Proxy(moto.url).running() as proxy:
        yield Store(moto, proxy, bucket, tmp_path, write_credentials(tmp_path / "credentials"))


@pytest.fixture
def large_store(tmp_path: Path) -> Iterator[Store]:
    """A store for many megabytes: moto needs ten times as long for each."""
    with WebServer({}).running() as web, Proxy(web.url).running() as proxy:
        yield Store(web, proxy, "bucket", tmp_path, write_credentials(tmp_path / "credentials"))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Fetched]:
    """Fetch one model from a web server by its URI."""

    # To load the machine's certificates takes longer than all the rest of a small fetch.
    no_certificates = {"SSL_CERT_FILE": "/dev/null"}

    def fetch(uri: str, *, name: str = "digits", timeout: float = 60, **fields: Any) -> Fetched:
        return Fetch(tmp_path, {"models": [{"name": name, "uri": uri, **fields}]}, timeout=timeout).run(no_certificates)

    return fetch
