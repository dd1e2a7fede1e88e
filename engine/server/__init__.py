"""The HTTP front of the engine and its command line."""
