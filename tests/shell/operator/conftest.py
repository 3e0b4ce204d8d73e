"""No certificates of the machine: kopf and aiohttp load them dozens of times, which is most of what some tests compute."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_system_certificates() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", "/dev/null")
        yield
