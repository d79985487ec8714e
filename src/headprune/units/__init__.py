"""Where are the heads? `resolve(model)` answers, from the family table or from the structure of the model."""

from headprune.units.families import Family, Layout, register_family, supported_model_types
from headprune.units.members import Head, Member, as_members, by_site, kept_mask, nan_scores, widest
from headprune.units.resolve import Survey, resolve, survey
from headprune.units.spec import AttentionSite, Kind, Projection, Site

__all__ = [
    "AttentionSite",
    "Family",
    "Head",
    "Kind",
    "Layout",
    "Member",
    "Projection",
    "Site",
    "Survey",
    "as_members",
    "by_site",
    "kept_mask",
    "nan_scores",
    "register_family",
    "resolve",
    "supported_model_types",
    "survey",
    "widest",
]
