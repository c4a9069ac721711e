"""One typed class a file: a declaration, and its typed reads and writes."""

from kvpool.extras import require

require(__name__, "torch")
