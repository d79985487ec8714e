"""Taking a dense model where the steps of a journal led, and checking that they do now what they did then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from headprune.errors import ReplayError
from headprune.measure.trajectory import Step, removed_until
from headprune.repair.remove import remove, remove_and_repair
from headprune.repair.solve import Compensation, Repair
from headprune.tasks import Task

# Errors of repairs are computed from float32 activations, which another CPU or another number of threads rounds
# otherwise; other data or other weights move them by far more.
REPLAY_TOLERANCE = 1e-3


def replay(
    model: PreTrainedModel,
    steps: Sequence[Step],
    calibration: Sequence[Mapping[str, Any]],
    compensate: Compensation,
    task: Task | None = None,
) -> PreTrainedModel:
    """Take a dense model, in place, to where these steps led. A repair depends on the model it was made for, so with
    compensation the steps are gone through one by one, and each must do what it did then."""
    if compensate == "none":
        return remove(model, removed_until(steps, len(steps) - 1))
    for step in steps:
        repairs = remove_and_repair(model, step.removed, compensate=compensate, batches=calibration, task=task)
        check_replay(step, repairs)
    return model


def check_replay(step: Step, repairs: Sequence[Repair]) -> None:
    """A repair that comes out otherwise than in the journal belongs to another model or to other data."""
    if not step.compensation:  # older journals do not say
        return
    then = {repair["site"]: repair for repair in step.compensation}
    for repair in repairs:
        known = then.get(repair.site)
        same = known is not None and known["kind"] == repair.kind
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
