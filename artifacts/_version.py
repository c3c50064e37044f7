"""The version of the whole distribution, read by the build backend too."""

__version__ = "0.1.0"
