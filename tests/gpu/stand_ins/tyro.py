"""Stands in for tyro: settings are declared, and no command line is read."""

from types import SimpleNamespace

conf = SimpleNamespace(Fixed="fixed", Suppress="suppress")
