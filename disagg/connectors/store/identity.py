"""Whose a request's state is: what is another tenant's, or another adapter's, has other keys."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass
from pathlib import Path

from disagg.log import log

Signature = tuple[tuple[str, int, int], ...]
"""Names, sizes and times of the files of a folder."""


@dataclass(frozen=True)
class Identity:
    """A tenant, as requests name it (vLLM's and SGLang's `cache_salt`), and the digest of the
    adapter that changes the model's weights.
    """

    tenant: str = ""
    adapter: str = ""

    @property
    def salt(self) -> str:
        """The salt of a request's keys. A tenant alone is the salt itself, as of `PrefixCache`; no
        two identities have one salt.
        """
        # a client's text may begin as ours do, or have half a character that is none in UTF-8
        if self.adapter or self.tenant.startswith("[") or not self.tenant.isprintable():
            return json.dumps([self.tenant, self.adapter])
        return self.tenant


class Adapters:
    """Digests of adapters (LoRA), of all files in a folder: a name or path says nothing of weights.
    They are computed in a thread; until then, and for what is no folder, there is none.
    """

    def __init__(self) -> None:
        self._digests: dict[str, tuple[Signature, str]] = {}
        self._started: set[str] = set()
        self._lock = threading.Lock()

    def digest(self, folder: str) -> str | None:
        """None until it is known, and if files have changed since it was computed: it is unknown
        which of the two an engine has loaded.
        """
        try:
            signature = _signature(Path(folder)) if folder else ()
        except OSError:
            return None
        if not signature:
            return None
        with self._lock:
            if folder in self._digests:
                earlier, digest = self._digests[folder]
                return digest if earlier == signature else None
            if folder not in self._started:
                self._started.add(folder)
                threading.Thread(
                    target=self._compute, args=(folder, signature), name="adapter", daemon=True
                ).start()
        return None

    def _compute(self, folder: str, signature: Signature) -> None:
        total = hashlib.blake2b(digest_size=16)
        try:
            for name, size, _ in signature:
                total.update(f"{name}\0{size}\0".encode(errors="surrogateescape"))
                with (Path(folder) / name).open("rb") as file:
                    while data := file.read(1 << 20):
                        total.update(data)
            if _signature(Path(folder)) != signature:
                raise OSError("its files change")
        except OSError as error:
            log.warning("store: state of adapter %s is not kept: %s", folder, error)
            return
        with self._lock:
            self._digests[folder] = signature, total.hexdigest()


def _signature(folder: Path) -> Signature:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    status = [(path.name, path.stat()) for path in files]
    return tuple((name, entry.st_size, entry.st_mtime_ns) for name, entry in status)
