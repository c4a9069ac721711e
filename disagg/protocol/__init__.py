"""Both sides of the hand-off as state machines: events in, effects out. No sockets, no threads, no
clock but the one that is given.
"""
