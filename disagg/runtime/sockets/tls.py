"""TLS 1.3 of one connection, between its stream and its messages; what one side shows its peers,
and which peers it trusts: files in PEM, and a context that is made again once they have changed.

Both sides have certificates of one authority. Which side a certificate is of stands in it twice: in
its extended key usage, which OpenSSL checks, and as a URI in its subjectAltName, so that another
service of the same authority is no peer.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from disagg.host.trusted_files import ANY, WRITE, open_folder, read_file, read_in_folder
from disagg.log import log
from disagg.protocol.status import Side
from kvpool.layout.text import one_line

USAGES: Mapping[Side, str] = {"prefill": "serverAuth", "decode": "clientAuth"}
"""The extended key usage of each side's certificate: prefill listens, decode dials."""
MAX_LISTED = 200
X509_V_ERR_INVALID_PURPOSE = 26
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_ONE_SIDE = "Are keys set on one side only?"
_REASONS = {
    "HTTP_REQUEST": f"it speaks no TLS. {_ONE_SIDE}",
    "WRONG_VERSION_NUMBER": f"it speaks no TLS. {_ONE_SIDE}",
    "UNSUPPORTED_PROTOCOL": "it offers no TLS 1.3.",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it shows no certificate.",
}
"""Why this side ends a handshake, by OpenSSL's name for it."""
_ALERTS = {
    "ALERT_UNKNOWN_CA": "another authority has made it, or the peer believes another one",
    "ALERT_CERTIFICATE_EXPIRED": "it has expired, by the peer's clock",
    "ALERT_UNSUPPORTED_CERTIFICATE": "it is another side's",
    "ALERT_CERTIFICATE_REQUIRED": "there is none",
}
"""Why a peer refuses this side's certificate, by the end of OpenSSL's name."""


class TLSFiles(TypedDict):
    """An organisation's own files, in PEM: the certificates of its authority, and this side's
    certificate (with those between) and private key.
    """

    ca: str | os.PathLike[str]
    certificate: str | os.PathLike[str]
    key: str | os.PathLike[str]


class PEM(NamedTuple):
    """This side's private key with its certificates, and the authority's certificates."""

    own: bytes
    ca: bytes


class TLSCredentials:
    """The files of a side. Raises ValueError if they are not good from the beginning."""

    def __init__(self, side: Side, option: str, paths: list[Path], read: Callable[[], PEM]) -> None:
        self.side = side
        self._option, self._paths, self._read = option, paths, read
        # before they are read: a change that comes between is seen by the next connection
        self._state = [_state(path) for path in paths]
        self._context: ssl.SSLContext | None = self._load()
        self._problem = ""

    def context(self) -> ssl.SSLContext:
        """For the next connection. Raises ValueError while files are not good, logged once."""
        state = [_state(path) for path in self._paths]
        if state != self._state:
            self._state = state
            try:
                self._context = self._load()
            except ValueError as error:
                self._context, self._problem = None, str(error)
                log.error("%s No new connection is possible until it is good.", error)
        if self._context is None:
            raise ValueError(self._problem)
        return self._context

    def _load(self) -> ssl.SSLContext:
        try:
            pem = self._read()
            problem = role_problem(_own_certificate(self.side, pem), self.side)
            if problem is None:
                return _context(self.side, pem)
        except FileNotFoundError as error:
            raise ValueError(f"{self._option}: {error.filename}: {error.strerror}.") from None
        except ssl.SSLCertVerificationError as error:
            problem = refusal(error, self.side)
        except ssl.SSLError as error:
            problem = f"no private key with its certificate: {error.reason or error.strerror}."
        except ValueError as error:
            raise ValueError(f"{self._option}: {error}") from None
        *_, certificate = self._paths
        raise ValueError(f"{self._option}: {certificate}: {problem}")


class Session:
    """What is sent waits in `sealed` until the stream takes it; `incoming` is what came and was not
    read yet. Methods raise ValueError with the peer's fault; an alert of it is in `sealed` then.
    """

    def __init__(self, credentials: TLSCredentials) -> None:
        serves = credentials.side == "prefill"
        self._peer: Side = "decode" if serves else "prefill"
        self.incoming, self.sealed = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = credentials.context().wrap_bio(self.incoming, self.sealed, serves)
        self.ended = False
        """Whether the peer has announced that nothing more comes."""
        self.refused = False
        """Whether the handshake has failed here."""

    def shake(self, data: memoryview) -> bool:
        """Goes on with the handshake; whether it is done."""
        self.incoming.write(data)
        try:
            self._tls.do_handshake()
            problem = role_problem(self._tls.getpeercert(), self._peer)
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            problem = self._problem(error)
        if problem is not None:
            self.refused = True
            raise ValueError(problem)
        return True

    def seal(self, data: bytes | bytearray) -> None:
        """Encrypts what is to be sent."""
        self._tls.write(data)

    def unseal(self, data: memoryview, into: memoryview) -> int:
        """Decrypts what has come; returns how many bytes of `into` that are. `into` may be the same
        memory, and holds what `data` makes complete, with one more record of 16 KiB.
        """
        self.incoming.write(data)
        count = 0
        try:
            while piece := int(self._tls.read(len(into) - count, into[count:])):
                count += piece
                # one more call would only say so, and each lets the GIL go
                if not (self.incoming.pending or self._tls.pending()):
                    return count
            self.ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise ValueError(self._problem(error)) from None
        return count

    def end(self) -> None:
        """Says that nothing more is sent."""
        with suppress(ssl.SSLError):  # the peer has not said so yet, or the session has failed
            self._tls.unwrap()

    def _problem(self, error: ssl.SSLError) -> str:
        reason = error.reason or "UNKNOWN"
        if isinstance(error, ssl.SSLCertVerificationError):
            return refusal(error, self._peer)
        if "ALERT" in reason:
            why = next((text for end, text in _ALERTS.items() if reason.endswith(end)), reason)
            return f"it refuses this side's certificate: {why}."
        return _REASONS.get(reason, f"its TLS is wrong: {reason}.")


def open_keys(path: str | os.PathLike[str], side: Side) -> TLSCredentials:
    """The credentials of a side in its file of `kvpool keys`, or in the folder of both files."""
    file = Path(path) / f"{side}.pem" if os.path.isdir(path) else Path(path)
    return TLSCredentials(side, "keys", [file], partial(_read_keys, file))


def open_tls_files(files: TLSFiles, side: Side) -> TLSCredentials:
    """The credentials of a side in an organisation's own files."""
    ca, certificate, key = (Path(files[name]) for name in ("ca", "certificate", "key"))

    def read() -> PEM:
        own = read_file(key, ANY) + b"\n" + read_file(certificate, WRITE)
        # a bundle may have comments in any encoding between its certificates
        authorities = _CERTIFICATE.findall(read_file(ca, WRITE))
        if not authorities:
            raise ValueError(f"{ca}: no certificate is in it.")
        return PEM(own, b"\n".join(authorities))

    return TLSCredentials(side, "tls", [ca, key, certificate], read)


def role_uri(side: Side) -> str:
    """How a side's certificate names it."""
    return f"urn:kvpool:{side}"


def role_problem(certificate: Mapping[str, Any] | None, side: Side) -> str | None:
    """What is wrong with a certificate, as `SSLObject.getpeercert` returns it, of a side."""
    names = (certificate or {}).get("subjectAltName", ())
    uris = [uri for kind, uri in names if kind == "URI"]
    if role_uri(side) in uris:
        return None
    listed = one_line(", ".join(uris), MAX_LISTED) or "no URI"
    return f"its certificate names {listed}; {side}'s has {role_uri(side)} in its subjectAltName."


def refusal(error: ssl.SSLCertVerificationError, side: Side) -> str:
    """Why a certificate is not taken for one of a side."""
    needed = ""
    if error.verify_code == X509_V_ERR_INVALID_PURPOSE:
        needed = f": {side}'s has the extended key usage {USAGES[side]}"
    return f"its certificate is refused: {error.verify_message}{needed}."


def _read_keys(file: Path) -> PEM:
    folder = open_folder(file.parent)
    try:
        data = read_in_folder(folder, file)
    except FileNotFoundError:
        cure = "Made once by kvpool keys FOLDER: copy it."
        raise ValueError(f"{file}: no such file. {cure}") from None
    finally:
        os.close(folder)
    ca = _CERTIFICATE.findall(data)[1:]  # the first is this side's
    if not ca:
        raise ValueError(f"{file}: not as kvpool keys writes it. Copy its file again.")
    return PEM(data, b"\n".join(ca))


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _context(side: Side, pem: PEM, *, verifies: bool = True) -> ssl.SSLContext:
    """The context of a side: prefill's serves."""
    serves = side == "prefill"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
    # a scheduler names ranks by address; a peer's side is in its certificate's URI
    context.check_hostname = False
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED if verifies else ssl.CERT_NONE
    # an organisation may name one of the authorities below its root
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if serves:
        context.num_tickets = 0  # every connection shows its certificate
    # OpenSSL reads files only; this one has the bytes whose owner and mode were checked
    file = os.memfd_create("kvpool", os.MFD_CLOEXEC)
    try:
        os.write(file, pem.own)
        context.load_cert_chain(f"/proc/self/fd/{file}", password=_no_password)
    finally:
        os.close(file)
    try:
        context.load_verify_locations(cadata=pem.ca.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise ValueError(f"the authority's certificate cannot be read: {error}.") from None
    return context


def _no_password() -> str:
    raise ValueError("the private key is encrypted. Give one without a password.")


def _own_certificate(side: Side, pem: PEM) -> Mapping[str, Any] | None:
    """This side's certificate, as a peer that believes `pem.ca` sees it: module ssl decodes none
    but a peer's. Raises SSLError if such a peer refuses it.
    """
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client, server = (
        _context("decode", pem, verifies=side == "prefill").wrap_bio(incoming, outgoing),
        _context("prefill", pem, verifies=side == "decode").wrap_bio(outgoing, incoming, True),
    )
    peer = client if side == "prefill" else server
    for end in (client, server, client, server):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return peer.getpeercert()
