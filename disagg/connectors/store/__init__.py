"""A serving engine's door to a store (`disagg.store`): requests begin with what any engine has
computed before, and what this one computes is stored.
"""
