"""Whose state it is: what keeps tenants apart in a store."""

from __future__ import annotations

import json


def salt_of(tenant: str | None, more: str | None) -> str:
    """The salt of a request: its tenant's, as other engines have it, and what else SGLang keeps
    apart (`extra_key`). No two pairs have the same.
    """
    tenant, more = tenant or "", more or ""
    return json.dumps([tenant, more]) if more or tenant.startswith("[") else tenant
