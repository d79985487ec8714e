"""Small models of any architecture, and small inputs to run them on."""

from .config import small_config
from .random_weights import randomise
from .sample_inputs import Run, attention_modules, sample_runs

__all__ = ["Run", "attention_modules", "randomise", "sample_runs", "small_config"]
