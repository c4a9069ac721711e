"""Certificates of a deployment, by package cryptography (extra `keys`)."""

from __future__ import annotations

import secrets
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from disagg.runtime.sockets.tls import Side, role_uri

CA_DAYS = 3650
EARLIER = timedelta(days=1)
"""By which certificates are valid before they are made: clocks of hosts differ."""
_USAGES = {"prefill": ExtendedKeyUsageOID.SERVER_AUTH, "decode": ExtendedKeyUsageOID.CLIENT_AUTH}


class Authority(NamedTuple):
    """A private key with its certificate, which signs others."""

    key: EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def key_pem(self) -> bytes:
        """The private key as a file holds it."""
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @property
    def pem(self) -> bytes:
        """The certificate as a file holds it."""
        return self.certificate.public_bytes(Encoding.PEM)


def new_authority() -> Authority:
    """An authority that signs itself."""
    return _certified(None, "kvpool keys", CA_DAYS, x509.BasicConstraints(True, 0))


def read_authority(key: bytes, certificate: bytes, folder: str) -> Authority:
    """The authority in two files of a folder. Raises ValueError for what is none."""
    try:
        private = load_pem_private_key(key, None)
        if not isinstance(private, EllipticCurvePrivateKey):
            raise ValueError("not as kvpool keys writes it")
        return Authority(private, x509.load_pem_x509_certificate(certificate))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder}: ca.key or ca.pem: {error}.") from None


def issue(authority: Authority, side: Side, days: float) -> tuple[bytes, str, datetime]:
    """A side's file, the SHA-256 of its certificate, and when that expires."""
    uri = x509.UniformResourceIdentifier(role_uri(side))
    own = _certified(
        authority,
        f"kvpool {side}",
        days,
        x509.BasicConstraints(False, None),
        x509.ExtendedKeyUsage([_USAGES[side]]),
        x509.SubjectAlternativeName([uri]),
    )
    fingerprint = own.certificate.fingerprint(SHA256()).hex(":").upper()
    expires = own.certificate.not_valid_after_utc
    return own.key_pem + own.pem + authority.pem, fingerprint, expires


def _certified(
    issuer: Authority | None, title: str, days: float, *extensions: x509.ExtensionType
) -> Authority:
    """A new private key, and its certificate by an issuer (None: by itself)."""
    key, now = generate_private_key(SECP256R1()), datetime.now(timezone.utc)
    # a random name: OpenSSL finds an issuer by its name, and a host may know several
    common = x509.NameAttribute(NameOID.COMMON_NAME, f"{title} {secrets.token_hex(4)}")
    subject = x509.Name([common])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + timedelta(days=days))
    )
    for extension in extensions:
        builder = builder.add_extension(
            extension, critical=isinstance(extension, x509.BasicConstraints)
        )
    return Authority(key, builder.sign(issuer.key if issuer else key, SHA256()))
