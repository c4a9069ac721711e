from .case import (
    Build as Build,
    Case as Case,
    ConformanceError as ConformanceError,
    Inapplicable as Inapplicable,
)
from .pools import POOLS as POOLS
from .run import check_device as check_device, check_pool as check_pool
