"""Moves state between pools: plans derived from layouts, engines that see only addresses and
lengths.
"""
