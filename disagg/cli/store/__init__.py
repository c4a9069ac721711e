"""The commands of `kvpool store`."""
