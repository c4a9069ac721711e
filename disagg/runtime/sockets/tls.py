"""TLS 1.3 of one connection, between its stream and its messages."""

from __future__ import annotations

import ssl
from contextlib import suppress

from disagg.runtime.sockets.credentials import Side, TLSCredentials, refusal, role_problem

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


class Session:
    """What is sent waits in `sealed` until the stream takes it. Methods raise ValueError, which
    says what is wrong with the peer; an alert for it is in `sealed` then.
    """

    def __init__(self, credentials: TLSCredentials) -> None:
        serves = credentials.side == "prefill"
        self._peer: Side = "decode" if serves else "prefill"
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = credentials.context().wrap_bio(self._incoming, self._outgoing, serves)
        self.sealed = b""
        self.ended = False
        """Whether the peer has said that nothing more comes."""
        self.refused = False
        """Whether the handshake has failed here."""

    @property
    def buffered(self) -> int:
        """Bytes of the stream that were not read yet."""
        return self._incoming.pending

    def shake(self, data: memoryview) -> bool:
        """Goes on with the handshake; whether it is done."""
        self._incoming.write(data)
        try:
            self._tls.do_handshake()
            problem = role_problem(self._tls.getpeercert(), self._peer)
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            problem = self._problem(error)
        finally:
            self._collect()
        if problem is not None:
            self.refused = True
            raise ValueError(problem)
        return True

    def seal(self, data: bytes | bytearray) -> None:
        """Encrypts what is to be sent."""
        self._tls.write(data)
        self._collect()

    def unseal(self, data: memoryview, into: memoryview) -> int:
        """Decrypts what has come; returns how many bytes of `into` that are. `into` may be the same
        memory, and holds what `data` makes complete, with one more record of 16 KiB.
        """
        self._incoming.write(data)
        count = 0
        try:
            while piece := int(self._tls.read(len(into) - count, into[count:])):
                count += piece
                # one more call would only say so, and each lets the GIL go
                if not (self._incoming.pending or self._tls.pending()):
                    return count
            self.ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise ValueError(self._problem(error)) from None
        finally:
            self._collect()
        return count

    def end(self) -> None:
        """Says that nothing more is sent."""
        with suppress(ssl.SSLError):  # the peer has not said so yet, or the session has failed
            self._tls.unwrap()
        self._collect()

    def _collect(self) -> None:
        if self._outgoing.pending:
            self.sealed += self._outgoing.read()

    def _problem(self, error: ssl.SSLError) -> str:
        reason = error.reason or "UNKNOWN"
        if isinstance(error, ssl.SSLCertVerificationError):
            return refusal(error, self._peer)
        if "ALERT" in reason:
            why = next((text for end, text in _ALERTS.items() if reason.endswith(end)), reason)
            return f"it refuses this side's certificate: {why}."
        return _REASONS.get(reason, f"its TLS is wrong: {reason}.")
