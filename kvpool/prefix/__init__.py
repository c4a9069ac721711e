"""Items that hold the state of prefixes of tokens: keys, and events. No torch."""
