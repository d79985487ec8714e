"""Checks that replayed steps have the repairs that the journal recorded."""

from __future__ import annotations

from collections.abc import Sequence

from headprune.errors import ReplayError
from headprune.measure.trajectory import Step
from headprune.repair.regression import LEAST_SQUARES, Repair

# Errors of repairs are computed from float32 activations, which another CPU or number of threads rounds differently;
# other data or other weights change them by far more.
REPLAY_TOLERANCE = 1e-3


def _current_kind(kind: str) -> str:
    """Journals of earlier versions have other names for the targets of least squares."""
    return "lstsq" if kind in ("site", *LEAST_SQUARES) else kind


def check_replay(step: Step, repairs: Sequence[Repair]) -> None:
    """Raise where a repair differs from the journal: then the model or the data has changed."""
    if not step.repairs:  # not recorded in older journals
        return
    recorded_by_site = {repair["site"]: repair for repair in step.repairs}
    for repair in repairs:
        recorded = recorded_by_site.get(repair.site)
        same = recorded is not None and _current_kind(recorded["kind"]) == _current_kind(repair.kind)
        for name in ("error_without", "error"):
            before, now = (recorded or {}).get(name), getattr(repair, name)
            if before is not None and now is not None:
                scale = max(abs((recorded or {}).get("error_without") or 0.0), abs(repair.error_without or 0.0))
                same = same and abs(before - now) <= REPLAY_TOLERANCE * scale
            else:
                same = same and before is now
        if not same:
            recorded_text = "nothing" if recorded is None else f"{recorded['kind']} with error {recorded['error']}"
            raise ReplayError(
                f"Step {step.step} cannot be repeated: at site {repair.site} the journal has {recorded_text}, and now "
                f"it is {repair.kind} with error {repair.error}; the model or the data has changed, so use another "
                "directory, or --overwrite."
            )
