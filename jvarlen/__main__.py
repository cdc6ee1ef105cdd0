"""`python -m jvarlen`."""

from jvarlen.cli import run

run()
