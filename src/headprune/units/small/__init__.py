"""Small models of any architecture, and small inputs to run them on."""

from .config import small_config
from .randomise import randomise

__all__ = ["randomise", "small_config"]
