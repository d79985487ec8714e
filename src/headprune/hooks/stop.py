"""Ending a forward pass before its end, by an exception that whoever runs it suppresses."""

from __future__ import annotations


class StopForwardError(Exception):
    """What the pass was run for has been seen, so the rest of it is not needed."""
