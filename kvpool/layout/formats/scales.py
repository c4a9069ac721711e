"""Values and the scales that multiply them: roles `x` and `x.scale`."""

from __future__ import annotations

from kvpool.layout.template import Cell


def scale_role(role: str) -> str:
    """The role of the scales of `role`."""
    return f"{role}.scale"


def scaled(
    role: str, count: int, block: int = 0, scale: str = "f32", *, dtype: str = "e4m3"
) -> tuple[Cell, Cell]:
    """The cells of `count` values of `dtype` and of their scales, one for each `block` values (0,
    or more than there are: one for all).

    Raises ValueError if `count` is not a multiple of `block`.
    """
    block = min(block or count, count)
    if count % block:
        raise ValueError(
            f"{role}: {count} elements are not a multiple of the block size {block}. Use a "
            "packing without scales."
        )
    return Cell(role, count, dtype), Cell(scale_role(role), count // block, scale)
