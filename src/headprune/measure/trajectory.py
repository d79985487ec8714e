"""Steps and trajectories: what was removed, in order, and all that was measured after each removal."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from headprune.errors import FormerName
from headprune.json_forms import COUNT_BY_NAME, INTERVAL, NUMBER, check_form
from headprune.measure.intervals import Interval
from headprune.measure.journal_codec import Deciles, deciles, decode_neurons, encode_neurons
from headprune.units import Member

CURVE_COLUMNS = "Pruned_Heads,Accuracy,Step,Removed_Heads,Agreement,Loss,Parameters,Attention_FLOPs,Low,High"
NEURON_COLUMNS = ",Removed_Neurons,Neurons"


# A line of a journal. Older ones have fewer entries.
LINE = {
    "step": int,
    "removed": [[int, int]],
    "score": NUMBER,
    "metric": NUMBER,
    "agreement": NUMBER,
    "loss": NUMBER,
    "units?": COUNT_BY_NAME,
    "applied?": COUNT_BY_NAME,
    "heads?": int,
    "applied_heads?": int,
    "parameters": int,
    "flops": int,
    "model_flops?": (int, None),
    "latency?": NUMBER,
    "interval?": INTERVAL,
    "compensation?": [{"site": int, "kind": str, "error": NUMBER, "error_without": NUMBER}],
    "outcomes?": (str, None),
    "scores": (None, [[NUMBER]]),
    "attention?": [int, int],
    "widths?": COUNT_BY_NAME,
    "removed_neurons?": {str: str},
    "neuron_scores?": (None, {str: (None, [NUMBER])}),
}


@dataclass(frozen=True)
class Step:
    """One removal. Step 0 is the dense model, where nothing was removed; `scores` are those that led to the removal.

    Of neurons a journal keeps the deciles of the scores at each site, so `scores` read from one are NaN there. A
    resumed one-shot schedule, which needs all of them, computes them again.
    """

    step: int
    removed: tuple[Member, ...]
    score: float | None  # mean score of the members that were removed
    metric: float
    agreement: float | None
    loss: float | None
    units: Mapping[str, int]  # kind -> members left, as parameterised
    applied: Mapping[str, int]  # the same, counted once per application (ALBERT's twelve uses of one head)
    parameters: int
    flops: int  # of the units that are left, for one sequence
    scores: torch.Tensor | None
    # Per site that lost units: its kind of repair, and the error on the calibration data without and with it.
    repairs: tuple[Mapping[str, Any], ...] = ()
    interval: Interval | None = None  # 95 %, of the metric
    per_sample: torch.Tensor | None = field(default=None, repr=False, compare=False)  # their mean is the metric

    # The number of attention sites, and the heads of the widest; sites after these have neurons. None where only heads
    # are pruned.
    attention: tuple[int, int] | None = None
    widths: Mapping[int, int] = field(default_factory=dict)  # neurons left, by feed-forward site
    neuron_scores: Mapping[int, Deciles | None] | None = None  # of `scores`, by site
    latency: float | None = None  # measured time relative to the dense model, where a budget asks for it
    model_flops: int | None = None  # of the whole model, for one sequence; older journals do not have it

    outcomes, compensation = FormerName("per_sample"), FormerName("repairs")

    def __post_init__(self) -> None:
        """One order, in memory and on disk: heads as they were removed, then neurons by site and id."""
        if self.attention is None:
            return
        heads = [member for member in self.removed if not self._is_neuron(member)]
        neurons = sorted(member for member in self.removed if self._is_neuron(member))
        object.__setattr__(self, "removed", (*heads, *neurons))
        if self.neuron_scores is None and self.scores is not None:
            object.__setattr__(self, "neuron_scores", deciles(self.scores, self.attention[0]))

    def _is_neuron(self, member: Member) -> bool:
        return self.attention is not None and member.site >= self.attention[0]

    @property
    def removed_heads(self) -> tuple[Member, ...]:
        return tuple(member for member in self.removed if not self._is_neuron(member))

    @property
    def removed_neurons(self) -> tuple[Member, ...]:
        return tuple(member for member in self.removed if self._is_neuron(member))

    @property
    def left(self) -> int:
        """Members of all kinds that are left."""
        return sum(self.units.values())

    @property
    def heads(self) -> int:
        return self.units.get("heads", 0)

    @property
    def neurons(self) -> int:
        return self.units.get("neurons", 0)

    @property
    def applied_heads(self) -> int:
        return self.applied.get("heads", 0)

    def to_json(self) -> dict[str, Any]:
        scores = self._head_scores()
        line = {
            "step": self.step,
            "removed": [list(member) for member in self.removed_heads],
            "score": finite_or_none(self.score),
            "metric": finite_or_none(self.metric),
            "interval": None
            if self.interval is None
            else [finite_or_none(self.interval.low), finite_or_none(self.interval.high)],
            "agreement": finite_or_none(self.agreement),
            "loss": finite_or_none(self.loss),
            "units": dict(self.units),
            "applied": dict(self.applied),
            "heads": self.heads,
            "applied_heads": self.applied_heads,
            "parameters": self.parameters,
            "flops": self.flops,
            "compensation": [dict(repair) for repair in self.repairs],
            "outcomes": None if self.per_sample is None else encode_per_sample(self.per_sample),
            "scores": None if scores is None else [[finite_or_none(v) for v in row] for row in scores.tolist()],
        }
        if self.model_flops is not None:
            line["model_flops"] = self.model_flops
        if self.latency is not None:
            line["latency"] = finite_or_none(self.latency)
        if self.attention is not None:
            line["attention"] = list(self.attention)
            line["widths"] = {str(site): width for site, width in self.widths.items()}
            line["removed_neurons"] = encode_neurons(self.removed_neurons)
            line["neuron_scores"] = (
                None
                if self.neuron_scores is None
                else {
                    str(site): None if values is None else [finite_or_none(value) for value in values]
                    for site, values in self.neuron_scores.items()
                }
            )
        return line

    def _head_scores(self) -> torch.Tensor | None:
        """The rows of attention, without the columns that only neurons have."""
        if self.scores is None or self.attention is None:
            return self.scores
        sites, widest = self.attention
        return self.scores[:sites, :widest]

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Step:
        """The step in a line of a journal; raises `ValueError` where the line has another form, or `KeyError`."""
        check_form(line, LINE)
        scores = line["scores"]
        if scores is not None:
            scores = torch.tensor([_numbers(row) for row in scores], dtype=torch.float64)
        summary = line.get("neuron_scores")
        if summary is not None:
            summary = {int(site): _numbers(values) for site, values in summary.items()}
            if scores is not None:
                if scores.numel() != math.prod(line["attention"]):
                    raise ValueError(f"the table of scores is not {line['attention']}")
                nothing = torch.full((len(summary), line["attention"][1]), math.nan, dtype=torch.float64)
                scores = torch.cat([scores.reshape(*line["attention"]), nothing])
        interval, per_sample = line.get("interval"), line.get("outcomes")  # which older journals do not have
        return cls(
            step=line["step"],
            removed=(
                *(Member(site, index) for site, index in line["removed"]),
                *decode_neurons(line.get("removed_neurons", {})),
            ),
            score=line["score"],
            metric=math.nan if line["metric"] is None else line["metric"],
            agreement=line["agreement"],
            loss=line["loss"],
            units=line.get("units") or {"heads": line["heads"]},
            applied=line.get("applied") or {"heads": line["applied_heads"]},
            parameters=line["parameters"],
            flops=line["flops"],
            scores=scores,
            repairs=tuple(line.get("compensation", ())),
            interval=None if interval is None else Interval(*_numbers(interval)),
            per_sample=None if per_sample is None else decode_per_sample(per_sample),
            latency=line.get("latency"),
            model_flops=line.get("model_flops"),
            attention=tuple(line["attention"]) if "attention" in line else None,
            widths={int(site): width for site, width in line.get("widths", {}).items()},
            neuron_scores=summary,
        )


def _numbers(values: Sequence[float | None] | None) -> Any:
    return None if values is None else tuple(math.nan if value is None else value for value in values)


def encode_per_sample(per_sample: torch.Tensor) -> str:
    """Values per sample as text: a bit each where samples are right or wrong, else a float32 each."""
    values = per_sample.double().numpy()
    if numpy.isin(values, (0.0, 1.0)).all():
        return f"bits:{len(values)}:" + base64.b64encode(numpy.packbits(values.astype(bool)).tobytes()).decode()
    return f"float32:{len(values)}:" + base64.b64encode(values.astype("<f4").tobytes()).decode()


def decode_per_sample(text: str) -> torch.Tensor:
    form, count, content = text.split(":", 2)
    raw = base64.b64decode(content)
    if form == "bits":
        values = numpy.unpackbits(numpy.frombuffer(raw, numpy.uint8))[: int(count)]
    elif form == "float32":
        values = numpy.frombuffer(raw, "<f4")
    else:
        raise ValueError(f"values per sample are in a form that this version does not know: {form}")
    if len(values) != int(count):
        raise ValueError(f"there are {len(values)} values per sample where {count} are announced")
    return torch.from_numpy(values.astype(numpy.float64))


def check_sequence(steps: Sequence[Step]) -> None:
    """Raise `ValueError` unless these can be the steps of one run: numbered in order, with the same units, tables of
    scores and samples, and removals that are in the table."""
    shapes = {tuple(step.scores.shape) for step in steps if step.scores is not None}
    samples = {len(step.per_sample) for step in steps if step.per_sample is not None}
    kinds = {(tuple(step.units), tuple(step.applied), step.attention) for step in steps}
    if len(shapes) > 1 or len(samples) > 1 or len(kinds) > 1:
        raise ValueError("its steps are of several models, or of several sets of samples")
    for number, step in enumerate(steps):
        if step.step != number:
            raise ValueError(f"step {number} has the number {step.step}")
        for member in step.removed:
            sites, heads = next(iter(shapes), (math.inf, math.inf)) if step.attention is None else step.attention
            if (
                member.site < 0
                or member.index < 0
                or (not step._is_neuron(member) and (member.site >= sites or member.index >= heads))
            ):
                raise ValueError(f"step {number} removes {tuple(member)}, which does not exist")


def finite_or_none(value: float | None) -> float | None:
    """JSON has neither NaN nor Infinity."""
    return None if value is None or not math.isfinite(value) else value


def removed_until(steps: Sequence[Step], last: int) -> list[Member]:
    """All members that were removed up to step `last`."""
    return [member for step in steps[: last + 1] for member in step.removed]


def curve_csv(steps: Sequence[Step]) -> str:
    """The curve with the papers' columns first, and those of neurons, where they are pruned, last. Pruned_Heads counts
    a tied head once per application, as they do."""
    neurons = bool(steps) and steps[0].attention is not None
    lines = [CURVE_COLUMNS + NEURON_COLUMNS if neurons else CURVE_COLUMNS]
    for step in steps:
        values: tuple[Any, ...] = (
            steps[0].applied_heads - step.applied_heads,
            step.metric,
            step.step,
            steps[0].heads - step.heads,
            step.agreement,
            step.loss,
            step.parameters,
            step.flops,
            None if step.interval is None else step.interval.low,
            None if step.interval is None else step.interval.high,
        )
        if neurons:
            values += (steps[0].neurons - step.neurons, step.neurons)
        lines.append(",".join("" if value is None else repr(value) for value in values))
    return "\n".join(lines) + "\n"
