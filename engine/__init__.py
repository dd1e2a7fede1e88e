"""Walkgate's Omni serving engine."""
