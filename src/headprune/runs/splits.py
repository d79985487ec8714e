"""Which rows of the data a run scores and repairs on, which it keeps for choices before it, and which it evaluates."""

from __future__ import annotations

from headprune import defaults
from headprune.data import Examples
from headprune.errors import DataError
from headprune.search.config import Experiment


def calibration_count(experiment: Experiment, rows: int) -> int:
    """How many of these rows, of the data to calibrate on, a run calibrates on."""
    wanted = experiment.calibration_samples
    if experiment.calibration is not None or experiment.same_data:
        return min(wanted or defaults.CALIBRATION_SAMPLES, rows)
    if wanted is None:
        share = max(int(defaults.CALIBRATION_SHARE * rows), defaults.FEW_CALIBRATION_SAMPLES)
        wanted = min(share, defaults.CALIBRATION_SAMPLES)
    return min(wanted, rows // 2)


def split_data(experiment: Experiment, examples: Examples) -> tuple[Examples, Examples | None]:
    """The calibration examples of the data (none, where there is other data for calibration), and the evaluation
    examples; None where these are the same."""
    calibration, _, evaluation = _three_parts(experiment, examples)
    return calibration, evaluation


def validation_examples(experiment: Experiment, examples: Examples) -> Examples:
    """The examples of the data that are neither scored nor evaluated, for choices before a run."""
    return _three_parts(experiment, examples)[1]


def default_validation(experiment: Experiment, rows: int) -> int:
    """How many of these rows to hold out where no number is named: as many as to calibrate on, and at most half of what
    calibration leaves."""
    count = calibration_count(experiment, rows)
    return max(1, min(count, (rows if experiment.calibration is not None else rows - count) // 2))


def _three_parts(experiment: Experiment, examples: Examples) -> tuple[Examples, Examples, Examples | None]:
    """The calibration, validation and evaluation examples of the data, drawn by the seed one after the other."""
    count, seed, held = calibration_count(experiment, len(examples)), experiment.seed, experiment.validation_samples
    if experiment.same_data:
        if held is not None:
            raise DataError("Validation samples are neither scored nor evaluated; leave out --same-data.")
        return examples.sample(count, seed), examples.select([]), None
    if experiment.calibration is not None:
        calibration, rest = examples.select([]), examples
    elif len(examples) < 2:
        raise DataError(
            f"{experiment.data} has too few rows to split them into calibration and evaluation; use --same-data."
        )
    else:
        calibration, rest = examples.split(count, seed)
    validation = examples.select([])
    if held is not None:
        if held >= len(rest):
            raise DataError(
                f"{held} validation samples leave none of the {len(rest)} rows of {experiment.data} that are not "
                "calibrated on; use fewer --validation-samples, or more data."
            )
        validation, rest = rest.split(held, seed)
    return calibration, validation, rest.sample(experiment.evaluation_samples, seed)
