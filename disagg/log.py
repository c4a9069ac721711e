"""The log of all of `disagg`. Connectors write to their serving engine's."""

import logging

log = logging.getLogger("disagg")
