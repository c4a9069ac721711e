"""Items of pools for requests: block tables, free lists, shared prefixes, pins of rooms."""
