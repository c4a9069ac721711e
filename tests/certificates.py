"""Certificates that are right but in one way, and TLS peers made of plain blocking sockets."""

from __future__ import annotations

import ssl
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone

from cryptography import x509
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.streams import Stream, dial

USAGES = {"prefill": ExtendedKeyUsageOID.SERVER_AUTH, "decode": ExtendedKeyUsageOID.CLIENT_AUTH}


def certify(keys, file, side, *, uri=None, usage=None, hours=1.0, password=None):
    """Writes a private key and its certificate of the authority in the folder `keys`, as an
    organisation would: for `side` if nothing else is said, valid until in `hours`.
    """
    authority = x509.load_pem_x509_certificate((keys / "ca.pem").read_bytes())
    signer = pem.load_pem_private_key((keys / "ca.key").read_bytes(), None)
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(timezone.utc)
    names = [x509.UniformResourceIdentifier(uri or f"urn:kvpool:{side}"), x509.DNSName("a.example")]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a host")]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(hours=hours))
        .add_extension(x509.ExtendedKeyUsage([USAGES[usage or side]]), False)
        .add_extension(x509.SubjectAlternativeName(names), False)
        .sign(signer, SHA256())
    )
    locked = pem.BestAvailableEncryption(password) if password else pem.NoEncryption()
    private = key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, locked)
    file.write_bytes(private + certificate.public_bytes(pem.Encoding.PEM))
    file.chmod(0o600)
    return file


def context(protocol, file=None, version=ssl.TLSVersion.TLSv1_3):
    """Shows the certificate in a file, believes everybody, and speaks one version of TLS."""
    made = ssl.SSLContext(protocol)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    made.minimum_version = made.maximum_version = version
    if file is not None:
        made.load_cert_chain(file)
    return made


@contextmanager
def dial_tls(address, file=None, version=ssl.TLSVersion.TLSv1_3):
    """A stream to an endpoint address, over TLS."""
    with dial(address) as stream:
        stream.socket.settimeout(20)
        client = context(ssl.PROTOCOL_TLS_CLIENT, file, version)
        stream.socket = client.wrap_socket(stream.socket)
        yield stream


def accept_tls(server, file):
    """The next connection of a Server, over TLS."""
    stream = server.accept()
    stream.socket.settimeout(20)
    stream.socket = context(ssl.PROTOCOL_TLS_SERVER, file).wrap_socket(stream.socket, True)
    return Stream(stream.socket)
