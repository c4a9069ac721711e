"""Transfers between layouts: `plan(sources, dest)` is a pure function of what they say.

Needs numpy and msgspec only.
"""

from disagg.plan.bind import CopyBatch
from disagg.plan.planner import IncompatibleLayouts, Reason, TransferPlan, plan
from disagg.plan.positions import IncompleteTransfer

__all__ = [
    "CopyBatch",
    "IncompatibleLayouts",
    "IncompleteTransfer",
    "Reason",
    "TransferPlan",
    "plan",
]
