"""All cases of h2spec against the gRPC port of the running server: the rules of HTTP/2 and HPACK, clause by clause.

h2spec cannot send a call of gRPC. Its requests are answered by HTTP status 415, which is an answer with a body as good as any
for these cases.
"""

from pathlib import Path

import pytest

import support.server
from support.h2spec import run_h2spec
from support.models import add_identity
from support.probe import go_tool, provided
from support.server import Start

pytestmark = pytest.mark.timeout(900)  # The first run builds h2spec, and Go's packages for it.

PKI = Path(support.server.__file__).parent / "pki"
TLS = ("--grpc-use-ssl=true", f"--grpc-server-cert={PKI / 'server.pem'}", f"--grpc-server-key={PKI / 'server.key'}")
CASES = 147


@pytest.fixture(scope="module")
def h2spec(pytestconfig: pytest.Config) -> Path:
    return provided(pytestconfig, lambda: go_tool("h2spec"))


@pytest.mark.parametrize(
    ("server_flags", "client_flags"),
    [((), ()), pytest.param(TLS, ("--tls", "--insecure"), marks=pytest.mark.large)],
    ids=["clear", "tls"],
)
def test_every_case_of_h2spec_passes(
    h2spec: Path,
    repository: Path,
    start: Start,
    tmp_path: Path,
    server_flags: tuple[str, ...],
    client_flags: tuple[str, ...],
) -> None:
    add_identity(repository, "ident")
    server = start("--model-repository", repository, *server_flags)
    report = run_h2spec(h2spec, server.grpc_port, tmp_path, *client_flags)
    assert report.failed == {}
    assert len(report.ran) == CASES
    assert server.stop() == 0, server.log
    assert "unexpected error" not in server.log
