"""What obstore's errors say, in a sentence. Its types are few, so their texts are read: the causes
of an error follow it, behind `Debug source`, and a server's answer is the XML that it sent.
"""

from __future__ import annotations

import os
import re

from disagg.store.floors.base import BeyondEnd, FloorError, FloorFull
from disagg.store.floors.url import FloorURL

CREDENTIALS = {
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give this host a role.",
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS, or give this host a service account.",
    "az": "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or another identity.",
}
"""By scheme: what would make a refused request work."""
_IDENTITY = re.compile(r"169\.254\.169\.254|/latest/api/token|/computeMetadata/|metadata/identity")
"""Where a host's role is asked for, if no variable has credentials."""
_FULL = re.compile(r"No space left on device|Disk quota exceeded|File too large")
_REFUSED = re.compile(r"status: 40[13]\b|PermissionDenied|Unauthenticated")
_BEYOND = re.compile(r"StartTooLarge|InvalidRange|status: 416\b")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist")
_ANSWER = re.compile(r"<Code>([^<]{1,80})</Code>\s*<Message>([^<]{1,300})</Message>")
_SYSTEM = re.compile(r'kind: (\w+),\s+message: "([^"]+)"')


def no_bucket(error: Exception) -> bool:
    """Whether it is the bucket that is not there, rather than the object."""
    return _NO_BUCKET.search(str(error)) is not None


def floor_error(url: FloorURL, what: str, error: Exception, seconds: float) -> FloorError:
    """The floor's error for one of obstore's; `seconds` is what a request may take."""
    text = str(error)
    reason = _reason(url, text, seconds)
    if _FULL.search(text):
        return FloorFull(f"{url}: {what}: there is no room ({reason}). Delete objects.")
    if _BEYOND.search(text):
        return BeyondEnd(f"{url}: {what}: the object ends before a range of it.")
    return FloorError(f"{url}: {what}: {reason}.")


def _reason(url: FloorURL, text: str, seconds: float) -> str:
    first, _, causes = text.partition("\n\nDebug source:")
    answer, system = _ANSWER.search(text), _SYSTEM.search(causes)
    detail = f"{answer[1]}: {answer[2].rstrip('.')}" if answer else ""
    advice = CREDENTIALS.get(url.scheme, "").rstrip(".")
    if no_bucket(Exception(text)):
        return f"there is no bucket {url.place!r}"
    if _asks_for_identity(text):
        return f"there are no credentials. {advice}"
    if _REFUSED.search(causes):
        return f"the credentials are refused ({detail or 'status 403'}). {advice}"
    if "kind: Timeout" in causes:
        return f"the server does not answer within {seconds:g} seconds"
    if "kind: Connect" in causes:
        return f"no server can be reached ({system[2] if system else 'connection failed'})"
    return detail or (system[2] if system else "") or " ".join(first.split())[:300].rstrip(".")


def _asks_for_identity(text: str) -> bool:
    """Whether the request that failed was for a host's role."""
    own = os.environ.get("AWS_METADATA_ENDPOINT", "")
    return bool(_IDENTITY.search(text)) or bool(own and own in text and "/api/token" in text)
