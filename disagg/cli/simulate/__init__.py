"""`kvpool simulate`: a fleet of endpoints in one process, under a clock of its own."""
