"""The command line. It uses the public API only: whatever it does, a program can do."""

from headwater.cli.main import main

__all__ = ["main"]
