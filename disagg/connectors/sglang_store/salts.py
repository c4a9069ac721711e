"""Whose state it is: what keeps tenants apart in a store."""

from __future__ import annotations

import json

from disagg.connectors.store.identity import Identity


def salt_of(tenant: str | None, more: str | None) -> str:
    """The salt of a request: its tenant's (`cache_salt`), as other engines have it, and what else
    SGLang keeps apart (`extra_key`). No two pairs have the same.
    """
    if more:  # three, where an identity is a tenant and an adapter
        return json.dumps([tenant or "", "", more])
    return Identity(tenant or "").salt
