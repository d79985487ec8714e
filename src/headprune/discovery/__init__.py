"""Finds the layout of a class that is not in the table of families, by experiments on a small random model of it.

Other rooms import only what is exported here, inside the functions that ask: loading needs none of it. `twin/` builds
the small models."""

from headprune.discovery.discover import discover, small_twin, whole_inputs
from headprune.discovery.feed_forward import discover_feed_forward

__all__ = ["discover", "discover_feed_forward", "small_twin", "whole_inputs"]
