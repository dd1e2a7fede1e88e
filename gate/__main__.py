"""`python -m gate`: the gate of this checkout, whatever is installed."""

from gate.cli import main

main()
