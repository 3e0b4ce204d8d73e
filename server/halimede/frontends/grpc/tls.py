"""TLS of the gRPC front end, and errors of certificates that name their flag."""

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from halimede.frontends.grpc.options import Tls

_CERT = "--grpc-server-cert"
_KEY = "--grpc-server-key"
_ROOT = "--grpc-root-cert"


def server_context(tls: Tls) -> ssl.SSLContext:
    """The context of a server that speaks HTTP/2; OSError that names the flag of a faulty file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # RFC 9113 section 9.2; OpenSSL's own ciphers for TLS 1.2 include none of those that it forbids.
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("ECDHE+AESGCM:ECDHE+CHACHA20")
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["h2"])
    with _as_file(tls.server_cert) as cert, _as_file(tls.server_key) as key, _as_file(tls.root_cert or b"") as root:
        _check_certificates(_CERT, cert)
        _load_key(context, cert, key)
        if tls.root_cert is not None:
            _check_certificates(_ROOT, root)
            context.load_verify_locations(root)
            context.verify_mode = ssl.CERT_REQUIRED
    return context


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    # ssl reads these only from files, but a key must not be written to a disk.
    descriptor = os.memfd_create("pem")
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _check_certificates(flag: str, path: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except ssl.SSLError as error:
        raise _fault(flag, f"the file holds no valid PEM certificate ({_reason(error)})") from None


def _load_key(context: ssl.SSLContext, cert: str, key: str) -> None:
    def refuse_password() -> str:
        # Without this callback the terminal would be asked for a password.
        raise _fault(_KEY, "the key is encrypted, and only a key without a password can be used")

    try:
        context.load_cert_chain(cert, key, refuse_password)
    except ssl.SSLError as error:
        match error.reason:
            case "KEY_VALUES_MISMATCH" | "KEY_TYPE_MISMATCH":
                raise _fault(_KEY, f"the key is not that of the certificate in {_CERT}") from None
            case "EE_KEY_TOO_SMALL" | "CA_KEY_TOO_SMALL" | "CA_MD_TOO_WEAK":
                raise _fault(_CERT, f"the certificate is too weak ({_reason(error)})") from None
            case _:
                raise _fault(_KEY, f"the file holds no valid PEM private key ({_reason(error)})") from None


def _fault(flag: str, text: str) -> OSError:
    return OSError(f"failed to start GRPC service: {flag}: {text}")


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "unreadable").lower().replace("_", " ")
