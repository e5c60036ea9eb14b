"""The public face: a session wraps models, makes their optimizer and commits their state."""

from offload.session.session import Session
from offload.session.stats import SessionStats

__all__ = ["Session", "SessionStats"]
