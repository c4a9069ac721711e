"""Whose state it is: what keeps tenants apart in a store."""

from __future__ import annotations

import json


def salt_of(tenant: str | None, more: str | None) -> str:
    """The salt of a request: its tenant's (`cache_salt`), as other engines have it, and what else
    SGLang keeps apart (`extra_key`). No two pairs have the same.
    """
    tenant, more = tenant or "", more or ""
    if more:  # three, where another engine's pair is a tenant and an adapter
        return json.dumps([tenant, "", more])
    # a client's text may begin as ours do, or have half a character that is none in UTF-8
    if tenant.startswith("[") or not tenant.isprintable():
        return json.dumps([tenant, ""])
    return tenant
