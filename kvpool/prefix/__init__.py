"""Items that hold the state of prefixes of tokens: a chain of keys and an index. No torch."""
