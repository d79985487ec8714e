"""Checking that the steps of a journal do now what they did then."""

from __future__ import annotations

from collections.abc import Sequence

from headprune.errors import ReplayError
from headprune.measure.trajectory import Step
from headprune.repair.regression import LEAST_SQUARES, Repair

# Errors of repairs are computed from float32 activations, which another CPU or another number of threads rounds
# otherwise; other data or other weights move them by far more.
REPLAY_TOLERANCE = 1e-3


def _current_kind(kind: str) -> str:
    """Journals of earlier versions have other words for the targets of least squares."""
    return "lstsq" if kind in ("site", *LEAST_SQUARES) else kind


def check_replay(step: Step, repairs: Sequence[Repair]) -> None:
    """A repair that comes out otherwise than in the journal belongs to another model or to other data."""
    if not step.compensation:  # older journals do not say
        return
    then = {repair["site"]: repair for repair in step.compensation}
    for repair in repairs:
        known = then.get(repair.site)
        same = known is not None and _current_kind(known["kind"]) == _current_kind(repair.kind)
        for name in ("error_without", "error"):
            before, now = (known or {}).get(name), getattr(repair, name)
            if before is not None and now is not None:
                scale = max(abs((known or {}).get("error_without") or 0.0), abs(repair.error_without or 0.0))
                same = same and abs(before - now) <= REPLAY_TOLERANCE * scale
            else:
                same = same and before is now
        if not same:
            was = "nothing" if known is None else f"{known['kind']} with error {known['error']}"
            raise ReplayError(
                f"Step {step.step} cannot be repeated: at site {repair.site} the journal says {was}, and now it is "
                f"{repair.kind} with error {repair.error}; the model or the data is another, so use another directory, "
                "or --overwrite."
            )
