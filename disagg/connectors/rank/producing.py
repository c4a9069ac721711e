"""The endpoint of a rank that prefills."""

from __future__ import annotations

from collections.abc import Mapping

from disagg.connectors.scales import scale_conventions
from disagg.connectors.settings import Settings
from disagg.portable.stored_as import stored_as
from disagg.protocol.messages import Convention
from disagg.runtime.converting_prefill import ConvertingPrefill
from disagg.runtime.options import Options
from disagg.runtime.prefill_endpoint import PrefillEndpoint
from kvpool.layout import PoolLayout


def prefill_endpoint(
    settings: Settings, layout: PoolLayout, options: Options, *, number: int, alone: bool
) -> PrefillEndpoint:
    """Of rank `number`, over its own memory, or over a pool of what it converts, which an engine
    does that prefills `alone`. Raises ValueError.
    """
    engine, addresses, lease = settings.new_engine(), settings.addresses(number), settings.lease
    if settings.convert_to is None:
        return PrefillEndpoint(layout, engine, **addresses, lease=lease, **options)
    if not alone:
        raise ValueError("convert_to: only an engine that decodes nothing converts what it sends.")
    offered, memory = stored_as(layout, settings.convert_to, settings.bytes_of("convert_room"))
    converted = options.copy()
    converted["conventions"] = offered_conventions(settings, offered, options["conventions"])
    return ConvertingPrefill(
        layout,
        offered,
        engine,
        addresses["bind"],
        memory=memory,
        advertise=addresses["advertise"],
        lease=lease,
        **converted,
    )


def offered_conventions(
    settings: Settings, offered: PoolLayout, conventions: Mapping[str, Convention]
) -> Mapping[str, Convention]:
    """Conventions of what a rank offers: what it has converted is scaled by nothing that no page
    has.
    """
    if settings.convert_to is None:
        return conventions
    return {**scale_conventions(offered, ()), **conventions}
