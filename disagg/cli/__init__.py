"""Commands that `disagg` adds to `kvpool`."""
