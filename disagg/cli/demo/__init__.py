"""A real model prefills in one process and decodes in another."""
