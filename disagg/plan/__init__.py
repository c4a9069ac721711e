"""Transfer plans between layouts: `plan(sources, dest)`. Needs numpy and msgspec only."""

from disagg.plan.bind import CopyBatch, Count
from disagg.plan.explain import ExplainRow, Explanation
from disagg.plan.lookup import IncompleteTransfer
from disagg.plan.match import Group
from disagg.plan.planner import TransferPlan, plan
from disagg.plan.refusal import IncompatibleLayouts, Reason

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
