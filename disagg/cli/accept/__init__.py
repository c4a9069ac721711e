"""One command that says whether a device, its engines and kvpool work together on a machine."""
