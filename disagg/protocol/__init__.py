"""Both sides of the hand-off as state machines: events in, effects out."""
