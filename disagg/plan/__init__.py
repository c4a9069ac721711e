"""Transfer plans between layouts: `plan(sources, dest)`. Needs numpy and msgspec only."""

from disagg.plan.bind import CopyBatch, Count
from disagg.plan.explain import ExplainRow, Explanation
from disagg.plan.lookup import IncompleteTransfer
from disagg.plan.match import Group
from disagg.plan.planner import IncompatibleLayouts, Reason, TransferPlan, plan

__all__ = [
    "CopyBatch",
    "Count",
    "ExplainRow",
    "Explanation",
    "Group",
    "IncompatibleLayouts",
    "IncompleteTransfer",
    "Reason",
    "TransferPlan",
    "plan",
]
