"""One typed class a file: a declaration, and its typed reads and writes."""
