"""Where are the heads? `resolve(model)` answers, from the family table or from the structure of the model."""

from headprune.units.everything import all_sites, sites_of
from headprune.units.families import Family, FeedForward, Layout, register_family, supported_model_types
from headprune.units.members import Head, Member, as_members, by_site, kept_mask, nan_scores, widest
from headprune.units.neurons.spec import NeuronSite
from headprune.units.resolve import Survey, resolve, survey
from headprune.units.spec import AttentionSite, Kind, Projection, Site

__all__ = [
    "AttentionSite",
    "Family",
    "FeedForward",
    "Head",
    "Kind",
    "Layout",
    "Member",
    "NeuronSite",
    "Projection",
    "Site",
    "Survey",
    "all_sites",
    "as_members",
    "by_site",
    "kept_mask",
    "nan_scores",
    "register_family",
    "resolve",
    "sites_of",
    "supported_model_types",
    "survey",
    "widest",
]
