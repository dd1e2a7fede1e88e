"""Paged KV memory: pages and plans."""
