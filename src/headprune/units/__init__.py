"""Where the heads and neurons of a model are: sites and their units, as axes of its tensors.

`resolve(model)` reads them, from the table of families (`families.py`, data only) or by discovery; `spec.py` defines a
site, `slicing/` slices weights and undoes it; `quirks.py` and `placeholders.py` have what a model needs beyond sliced
weights, with torch alone, because portable checkpoints carry them."""

from headprune.units.families import Family, FeedForward, Layout, register_family, supported_model_types
from headprune.units.members import Head, Member, as_members, by_site, kept_mask, nan_scores, widest
from headprune.units.resolve import Survey, all_sites, resolve, sites_of, survey
from headprune.units.spec import Axis, Kind, Site

__all__ = [
    "Axis",
    "Family",
    "FeedForward",
    "Head",
    "Kind",
    "Layout",
    "Member",
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
