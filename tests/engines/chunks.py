"""What tests of stores know of chunks: how much of a prompt is found, and when it is stored."""

from __future__ import annotations

import time
from contextlib import closing

from disagg.store.chunks import KINDS
from disagg.store.floors import open_floor
from disagg.store.floors.base import Floor
from disagg.store.upkeep.inventory import object_name, taken
from kvpool.prefix.chain import Chain, PrefixKey, token_ids
from tests.engines.process import EngineFailed

CHUNK = 256


def whole_chunks(length: int) -> int:
    """How many tokens of a prompt are found: its last token is always computed."""
    return (length - 1) // CHUNK * CHUNK


def chunk_keys(prompt: list[int], tenant: str = "") -> list[PrefixKey]:
    """Keys of the chunks that are found."""
    chain = Chain(CHUNK, tenant)
    chain.append(token_ids(prompt[: whole_chunks(len(prompt))]))
    return chain.keys


def until_stored(
    url: str, prompts: list[list[int]], tenant: str = "", seconds: float = 30.0
) -> None:
    """Waits until a store of one model has every object of the chunks of prompts."""
    until = time.monotonic() + seconds
    keys = [chunk_keys(prompt, tenant) for prompt in prompts]
    with closing(open_floor(url)) as floor:
        while count := sum(_is_lacking(floor, keys)):
            if time.monotonic() > until:
                raise EngineFailed(f"{url} lacks objects of {count} chunks after {seconds:.0f} s.")
            time.sleep(0.05)


def _is_lacking(floor: Floor, prompts: list[list[PrefixKey]]) -> list[bool]:
    """For each chunk of prompts, by key, whether an object of it is not there. Objects are complete
    if one geometry's are: one of each part that has the kind. Recurrent state ends with a prompt's
    last chunk.
    """
    entries = list(floor.list(""))
    stored = {
        (name.geometry, name.key, name.kind, name.part)
        for entry in entries
        if (name := object_name(entry.name))
    }
    namespaces = taken(floor, entries).namespaces.values()
    geometries = [one for namespace in namespaces for one in namespace.geometries.values()]
    lacking = []
    for keys in prompts:
        for key in keys:
            kinds = [kind for kind in KINDS if kind != "state" or key == keys[-1]]
            needed = (
                {
                    (geometry.digest, key, kind, part)
                    for kind in kinds
                    for part in geometry.with_kind(kind)
                }
                for geometry in geometries
            )
            lacking.append(not any(objects <= stored for objects in needed))
    return lacking
