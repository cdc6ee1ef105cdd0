"""The version of the package, alone, so that telling it imports nothing."""

__all__ = ["__version__"]

__version__ = "0.1.0"
