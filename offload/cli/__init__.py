"""The command `offload`: it reads arguments, calls `offload.runs` and prints; no logic."""

from offload.cli.app import main

__all__ = ["main"]
