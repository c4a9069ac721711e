"""Items that hold the state of prefixes of tokens: a chain of keys, an index, events. No torch."""
