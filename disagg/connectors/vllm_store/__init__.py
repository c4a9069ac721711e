"""vLLM's door to a store: its requests, blocks and configuration, as `disagg.connectors.store`
takes them. Loaded where an engine has a store.
"""
