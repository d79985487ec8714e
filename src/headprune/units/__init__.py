"""Where are the heads? `resolve(model)` answers, from the family table or from the structure of the model."""

from headprune.units.families import Family, Layout, register_family, supported_model_types
from headprune.units.resolve import resolve
from headprune.units.spec import AttentionSite, Projection

__all__ = [
    "AttentionSite",
    "Family",
    "Layout",
    "Projection",
    "register_family",
    "resolve",
    "supported_model_types",
]
