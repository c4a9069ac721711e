"""An engine whose package needs another that is not installed."""

import not_installed_anywhere  # noqa: F401


class Optional:
    """Cannot be imported."""
