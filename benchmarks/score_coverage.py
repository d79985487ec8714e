"""The columns "scores" and "rounds" of benchmarks.model_coverage: what a user gets by the defaults.

scores    equal          the default criterion gives the same finite scores for a batch of two samples and for each
                         of them alone
          differ         it gives others
          no samples     the code of the model itself computes others for a sample in a batch, or draws at random
rounds    finished       a run to 0.8 of the FLOPs, in two rounds, ends
          too wide       the small model has feed-forward layers so wide that a run takes minutes
both      refused        headprune says why not
          fails          another error
          not run        no inputs were found on which the model runs as a whole, or, for scores, on one sample
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

import headprune
from headprune.discovery.twin import Run
from headprune.errors import HeadpruneError
from headprune.tasks import batch_size, task_of
from headprune.units import all_sites

BUDGET = {"keep_flops": 0.8, "rounds": 2}
WIDE = 2048  # columns of a site whose elimination takes minutes
TOLERANCE = 1e-4  # of scores in float32, relative to the largest


def score_row(model: Any, runs: Sequence[Run]) -> dict[str, Any]:
    """Both columns, and the reasons where one of them is not as it should be."""
    inputs = next((run.inputs for run in runs if not run.path), None)
    if inputs is None:
        return {"scores": "not run", "rounds": "not run"}
    batch = {name: value for name, value in copy.deepcopy(inputs).items() if value is not None}
    if _failure(model, batch):  # without a KV cache, in float64
        model = copy.deepcopy(model).float()
        batch = {name: value.float() if _is_floating(value) else value for name, value in batch.items()}
        if why := _failure(model, batch):
            return {"scores": "not run", "rounds": "not run", "score_reason": f"without a KV cache: {why}"}
    scores, why_scores = _outcome(lambda: _compare_batches(model, batch))
    rounds, why_rounds = _outcome(lambda: _prune(copy.deepcopy(model), batch))
    reasons = [f"{column}: {why}" for column, why in (("scores", why_scores), ("rounds", why_rounds)) if why]
    return {"scores": scores, "rounds": rounds, "score_reason": "; ".join(dict.fromkeys(reasons))}


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _failure(model: Any, batch: dict[str, Any]) -> str:
    """Why the code of the model does not run on these inputs; empty where it does."""
    try:
        with torch.no_grad():
            model(**task_of(model).inputs(copy.deepcopy(batch)))
    except Exception as error:
        return error_text(error)
    return ""


def _outcome(attempt: Callable[[], str]) -> tuple[str, str]:
    """What came of it, and why not where it did not work."""
    try:
        return attempt(), ""
    except HeadpruneError as error:
        return "refused", error_text(error)
    except Exception as error:
        return "fails", error_text(error)


def error_text(error: Exception) -> str:
    """One line that is never empty."""
    text = " ".join(str(error).split())
    named = text and isinstance(error, HeadpruneError)
    return (text if named else f"{type(error).__name__}: {text or 'no text'}")[:300]


def _compare_batches(model: Any, batch: dict[str, Any]) -> str:
    task = task_of(model)
    alone = [task.select(batch, slice(row, row + 1)) for row in range(batch_size(batch))]
    if any(_failure(model, sample) for sample in alone):
        return "not run"
    logits = [[_logits(model, task, data) for data in samples] for samples in ([batch], alone)]
    if not _close(logits[0][0], torch.cat(logits[1])):
        return "no samples"
    both, single = (headprune.score(model, data, progress=False).scores for data in ([batch], alone))
    known = ~single.isnan()
    scale = float(single[known].abs().max()) if known.any() else 0.0
    finite = bool(torch.isfinite(both[known]).all() and torch.isfinite(single[known]).all())
    close = torch.allclose(both[known], single[known], rtol=TOLERANCE, atol=TOLERANCE * scale)
    return "equal" if finite and close and torch.equal(known, ~both.isnan()) else "differ"


def _logits(model: Any, task: Any, batch: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = task.logits(model(**task.inputs(copy.deepcopy(batch))))
    return logits


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, atol=TOLERANCE * float(other.abs().max()))


def _prune(model: Any, batch: dict[str, Any]) -> str:
    if any(site.size * site.width > WIDE for site in all_sites(model)):
        return "too wide"
    headprune.prune(model, [batch], progress=False, **BUDGET)
    return "finished"
