"""Key files of a deployment, by package cryptography (extra `keys`). The folder (`kvpool keys
FOLDER`) holds `ca.key` and `ca.pem`, an authority of its own, and for each side a file to be copied
to its hosts: `prefill.pem` and `decode.pem` with the side's private key, its certificate, and the
authority's. `ca.key` stays where it is: it can make certificates of either side.
"""

from __future__ import annotations

import os
import secrets
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple

from disagg.host.trusted_files import open_folder, read_in_folder, write_file
from disagg.protocol.status import Side
from disagg.runtime.sockets.tls import USAGES, role_uri
from kvpool.extras import needed_by

with needed_by("kvpool keys"):
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

SIDE_DAYS = 365
CA_DAYS = 3650
EARLIER = timedelta(days=1)
"""By which certificates are valid before they are made: clocks of hosts differ."""
_USAGES = {"prefill": ExtendedKeyUsageOID.SERVER_AUTH, "decode": ExtendedKeyUsageOID.CLIENT_AUTH}


class KeyFile(NamedTuple):
    """A side's file, the SHA-256 of its certificate, and when that expires."""

    side: Side
    path: Path
    fingerprint: str
    expires: datetime


class Authority(NamedTuple):
    """A private key with its certificate, which signs others."""

    key: EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def files(self) -> tuple[bytes, bytes]:
        """The private key and the certificate as files hold them."""
        key = self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return key, self.certificate.public_bytes(Encoding.PEM)


def write_keys(
    path: str | os.PathLike[str], days: float = SIDE_DAYS, *, renew: bool = False
) -> list[KeyFile]:
    """Makes an authority and the files of both sides, valid for `days`, in a new folder that only
    its owner may open. With `renew`, replaces both sides' files in such a folder by new ones of its
    authority. Raises OSError, ValueError for another folder.
    """
    place = Path(path)
    if not renew:
        place.mkdir(0o700)
    folder, files = open_folder(place), []
    try:
        if renew:
            key, certificate = (read_in_folder(folder, place / n) for n in ("ca.key", "ca.pem"))
            authority = _read_authority(key, certificate, place)
        else:
            authority = _certified(None, "kvpool keys", CA_DAYS, x509.BasicConstraints(True, 0))
            for name, data in zip(("ca.key", "ca.pem"), authority.files):
                write_file(folder, name, data, 0o600)
        for side in USAGES:
            uri = x509.UniformResourceIdentifier(role_uri(side))
            own = _certified(
                authority,
                f"kvpool {side}",
                days,
                x509.BasicConstraints(False, None),
                x509.ExtendedKeyUsage([_USAGES[side]]),
                x509.SubjectAlternativeName([uri]),
            )
            name, new = f"{side}.pem", f".{side}.{secrets.token_hex(4)}"
            write_file(folder, new, b"".join((*own.files, authority.files[1])), 0o600)
            # whole or not at all: an endpoint may read it at any time
            os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
            fingerprint = own.certificate.fingerprint(SHA256()).hex(":").upper()
            expires = own.certificate.not_valid_after_utc
            files.append(KeyFile(side, place / name, fingerprint, expires))
    finally:
        os.close(folder)
    return files


def _read_authority(key: bytes, certificate: bytes, folder: Path) -> Authority:
    """The authority in two files of a folder. Raises ValueError for what is none."""
    try:
        private = load_pem_private_key(key, None)
        if not isinstance(private, EllipticCurvePrivateKey):
            raise ValueError("not as kvpool keys writes it")
        return Authority(private, x509.load_pem_x509_certificate(certificate))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder}: ca.key or ca.pem: {error}.") from None


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
        critical = isinstance(extension, x509.BasicConstraints)
        builder = builder.add_extension(extension, critical)
    return Authority(key, builder.sign(issuer.key if issuer else key, SHA256()))
