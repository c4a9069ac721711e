"""The conformance kit: checks that every device and every pool must pass.

`pytest --pyargs kvpool.testing --device NAME` runs all of it; `check_device` and `check_pool` run
the same checks without pytest. Expected bytes are computed in numpy from the layout's formula and
the definitions of the formats, never by the device under test or `kvpool.device.quant`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.lazy import exports

if TYPE_CHECKING:
    from kvpool.testing.case import Build as Build
    from kvpool.testing.case import Case as Case
    from kvpool.testing.case import ConformanceError as ConformanceError
    from kvpool.testing.case import Inapplicable as Inapplicable
    from kvpool.testing.pools import POOLS as POOLS
    from kvpool.testing.run import check_device as check_device
    from kvpool.testing.run import check_pool as check_pool

# pytest loads the plugin beside this in every run, and that may not cost torch
__all__, __dir__, __getattr__ = exports(
    __name__,
    {
        "case": "Build Case ConformanceError Inapplicable",
        "pools": "POOLS",
        "run": "check_device check_pool",
    },
)
