"""The benchmarking and regression gate: starts servers of two arms, speaks HTTP, never imports the engine."""
