"""The conformance kit: checks that every device and every pool must pass.

`pytest --pyargs kvpool.testing --device NAME` runs all of it; `check_device` and `check_pool` run
the same checks without pytest. Expected bytes are computed in numpy from the layout's formula and
the definitions of the formats, never by the device under test or `kvpool.device.quant`.
"""

from kvpool.extras import attach

# pytest loads the plugin in every run, which must not import torch
__getattr__, __dir__, __all__ = attach(__name__, __file__)
