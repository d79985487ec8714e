"""Finding the layout of a class that is not in the table of families, by experiment on a small random model of it.

Other rooms import nothing else than what is exported here, inside the functions that ask: loading needs none of it."""

from headprune.discovery.attention import DiscoveryError
from headprune.discovery.dense_site import site_of
from headprune.discovery.feed_forward import discover_feed_forward
from headprune.discovery.public import discover, small_twin, whole_inputs

__all__ = [
    "DiscoveryError",
    "discover",
    "discover_feed_forward",
    "site_of",
    "small_twin",
    "whole_inputs",
]
