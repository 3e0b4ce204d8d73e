"""Certificates and kubeconfig files, with which Kubernetes' programs and people log in."""

import base64
import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


@dataclass(frozen=True)
class Identity:
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes

    def write(self, stem: Path) -> None:
        stem.with_suffix(".crt").write_bytes(self.certificate)
        stem.with_suffix(".key").write_bytes(self.key)


class Authority:
    """Signs what a cluster's programs show each other."""

    def __init__(self, name: str) -> None:
        self._name = _subject(name, "")
        self._key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.KeyUsage(
            digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
            data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        builder = _builder(self._name, self._name, self._key)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        signed = builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())
        self.certificate = signed.public_bytes(serialization.Encoding.PEM)

    def issue(self, common_name: str, organization: str = "", *hosts: str) -> Identity:
        """For a client by this name, and for a server by these names and addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
        builder = _builder(_subject(common_name, organization), self._name, key).add_extension(usage, critical=False)
        if hosts:
            names: list[x509.GeneralName] = [
                x509.IPAddress(IPv4Address(host)) if host[0].isdecimal() else x509.DNSName(host) for host in hosts
            ]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        return Identity(signed.public_bytes(serialization.Encoding.PEM), _pem(key))


def key_pair() -> tuple[bytes, bytes]:
    """The private and the public key that sign and check ServiceAccounts' tokens."""
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return _pem(key), public


def write_kubeconfig(path: Path, server: str, authority: bytes, user: Identity | str) -> Path:
    """A kubeconfig for a certificate or a token, with nothing in other files."""
    shown = (
        {"token": user}
        if isinstance(user, str)
        else {"client-certificate-data": _base64(user.certificate), "client-key-data": _base64(user.key)}
    )
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": server, "certificate-authority-data": _base64(authority)}}],
        "users": [{"name": "test", "user": shown}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(document, indent=1))
    return path


def _subject(common_name: str, organization: str) -> x509.Name:
    parts = [(NameOID.ORGANIZATION_NAME, organization), (NameOID.COMMON_NAME, common_name)]
    return x509.Name([x509.NameAttribute(kind, value) for kind, value in parts if value])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=30))


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
