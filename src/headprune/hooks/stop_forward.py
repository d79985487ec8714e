"""The exception by which a hook ends a forward pass early."""

from __future__ import annotations


class StopForwardError(Exception):
    """The rest of the forward pass is not needed; the caller catches this."""
