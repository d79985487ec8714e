"""Forecasts the peak memory and the passes over the data of each schedule, from the shapes of a model.

The formula is a sum of named terms, and docs/scale.md shows it with the same names. A phase of a schedule holds some of
them at once; the largest phase is the peak. Terms count tensors (weights, activations that a backward pass
needs, moments, caches), not what an allocator keeps in reserve: measured peaks are in docs/scale.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.hooks.logit_blocks import at_once, takes_logits_to_keep
from headprune.hooks.module_paths import layer_path
from headprune.measure.costs import total_parameters
from headprune.measure.dummy_inputs import default_tokens
from headprune.search import memory
from headprune.search.layerwise import choose
from headprune.search.memory import cache_bytes, target_bytes, token_bytes
from headprune.signals.moments import FOLDS
from headprune.signals.tokens import DRAWS
from headprune.tasks import task_of
from headprune.units import all_sites
from headprune.units.linear import PLAIN, in_features, out_features

BASE = 540 * 2**20  # Python, torch and transformers with nothing loaded
DOUBLE, SINGLE = 8, 4  # bytes of a number; moments are summed and solved in float64
SOLVING = 4  # further matrices of the size of a site's moments that solving needs
ELIMINATING = 5  # the same for elimination
ROUNDS = 6

Terms = dict[str, int]  # bytes by name


@dataclass(frozen=True)
class Calibration:
    """The size of the data, and the settings of its computation."""

    samples: int = 128
    length: int = 128  # tokens of each
    batch_size: int = 32
    evaluation: int = 128  # samples that the model is evaluated on after every step
    dtype: torch.dtype = torch.float32
    memory: int = memory.DEFAULT  # the limit of caches

    @property
    def tokens(self) -> int:
        return self.samples * self.length

    @property
    def batch_tokens(self) -> int:
        return min(self.batch_size, self.samples) * self.length


@dataclass(frozen=True)
class SiteShape:
    kind: str
    units: int
    inputs: int  # columns of its output map
    outputs: int  # rows of it
    applications: int  # how often a forward pass runs it


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that the formula uses; one without a site that can be pruned is refused."""

    parameters: int
    item: int  # bytes of a number
    stored: int  # the same in the checkpoint
    layers: int
    layer: int  # parameters of the largest layer
    table: int  # parameters of the largest table outside of layers: tokens by width
    width: int  # of the residual stream
    saved: int  # numbers per token that a backward pass needs: outputs of all maps, and inputs of output maps
    passing: int  # numbers per token in memory at once in the widest layer, without a backward pass
    classes: int  # logits per token, 0 where a model has one prediction per text
    in_blocks: bool  # whether logits can be computed in blocks of tokens
    sites: tuple[SiteShape, ...]

    @classmethod
    def of(cls, model: PreTrainedModel, dtype: torch.dtype) -> Shape:
        """From a model with or without weights."""
        sites, shapes = all_sites(model), []
        layers: dict[str, list[int]] = {}  # path -> numbers of a token, applications, parameters
        for site in sites:
            output: Any = model.get_submodule(site.o)
            columns, rows = in_features(output), out_features(output)
            shapes.append(SiteShape(site.kind, site.size // site.group, columns, rows, site.applications))
            path = layer_path(site.path)
            if path not in layers:
                maps = [part for part in model.get_submodule(path).modules() if isinstance(part, PLAIN)]
                layers[path] = [sum(map(out_features, maps)), 0, total_parameters(model.get_submodule(path))]
            layers[path][0] += columns
            layers[path][1] = site.applications
        inside = {id(p) for path in layers for p in model.get_submodule(path).parameters()}
        stored = getattr(model.config, "dtype", None) or torch.float32
        head = model.get_output_embeddings()
        return cls(
            parameters=total_parameters(model),
            item=dtype.itemsize,
            stored=stored.itemsize if isinstance(stored, torch.dtype) else getattr(torch, str(stored)).itemsize,
            layers=len(layers),
            layer=max(size for _, _, size in layers.values()),
            table=max((p.numel() for p in model.parameters() if id(p) not in inside), default=0),
            width=max(site.outputs for site in shapes),
            saved=sum(numbers * times for numbers, times, _ in layers.values()),
            passing=max(numbers for numbers, _, _ in layers.values()),
            classes=0 if head is None else out_features(head),
            in_blocks=takes_logits_to_keep(model) and task_of(model).name == "causal-lm",
            sites=tuple(shapes),
        )

    @property
    def heads(self) -> list[SiteShape]:
        return [site for site in self.sites if site.kind == "heads"]


@dataclass(frozen=True)
class Need:
    """The forecast of one schedule. `forwards` are passes over the calibration data, a backward pass counting as two;
    `evaluations` are passes over the evaluation data, at most."""

    schedule: str
    phases: Mapping[str, Terms]
    steps: int
    forwards: float
    per_step: float
    evaluations: int

    @property
    def phase(self) -> str:
        """The phase with the largest memory."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def terms(self) -> Terms:
        return self.phases[self.phase]

    @property
    def memory(self) -> int:
        return sum(self.terms.values())

    def to_json(self) -> dict[str, Any]:
        names = ("schedule", "memory", "phase", "terms", "steps", "per_step", "forwards", "evaluations", "phases")
        return {name: getattr(self, name) for name in names}


def forecast(model: PreTrainedModel, data: Calibration) -> list[Need]:
    """The forecasts of greedy, one-shot, rounds and layerwise for this model, which may be on the meta device."""
    shape = Shape.of(model, data.dtype)
    return [*_greedy_and_one_shot(shape, data), _rounds(shape, data), _layerwise(shape, data)]


def tokens_in(model: PreTrainedModel, max_length: int) -> int:
    """Tokens of a sample: of a text `max_length`, if the model takes as many."""
    if model.main_input_name != "input_ids":
        return default_tokens(model)
    return min(max_length, getattr(model.config.get_text_config(), "max_position_embeddings", None) or max_length)


def repair_passes(shape: Shape) -> float:
    """Passes of a repair front to back: every layer runs once for each of its sites and once repaired."""
    return len(shape.sites) / max(shape.layers, 1) + 1


def shared_terms(shape: Shape, data: Calibration) -> Terms:
    """The terms that are the same in every schedule."""
    logits, hidden = data.batch_tokens * shape.classes * shape.item, 0
    if shape.in_blocks:
        whole, logits = logits, at_once(data.batch_tokens // data.length, data.length, shape.classes) * shape.item
        hidden = 0 if logits == whole else data.batch_tokens * shape.width * shape.item  # gradients at hidden states
    weights = shape.parameters * shape.item
    cached = shape.layers * data.evaluation * data.length * shape.width * shape.item
    return {
        "base": BASE,
        "weights": weights,
        "dense copy": weights,  # to compare the pruned model with at the end
        "layer cache": min(cache_bytes(data.memory), cached),
        "passing": data.batch_tokens * shape.passing * shape.item,
        "saved for backward": data.batch_tokens * shape.saved * shape.item,
        "logits, forward": 2 * logits,
        "logits, backward": 3 * logits + hidden,
        "copy to write": 0 if shape.stored == shape.item else shape.parameters * shape.stored,
        "dense outputs": min(
            target_bytes(data.memory),
            2 * data.tokens * sum(site.outputs * site.applications for site in shape.sites) * shape.item,
        ),
        "two layers": 2 * shape.layer * shape.item,
        "table": shape.table * shape.item,
    }


def _phase(terms: Terms, *names: str, **more: int) -> Terms:
    """These terms; logits of either pass are called logits."""
    chosen = {name.partition(",")[0]: terms[name] for name in names}
    return {**chosen, **{name.replace("_", " "): size for name, size in more.items()}}


def _token_groups(sizes: list[int], limit: int) -> list[int]:
    """Bytes of the tokens of each group of sites that fit into memory together; each group takes its own passes."""
    groups = [0]
    for size in sizes:
        if groups[-1] and groups[-1] + size > limit:
            groups.append(0)
        groups[-1] += size
    return groups


def _greedy_and_one_shot(shape: Shape, data: Calibration) -> list[Need]:
    """A forward and a backward for the scores of every group of sites: before every removal, whose repair uses the same
    tokens; or once, after which every repair takes a pass up to its site, half a pass on average."""
    terms = shared_terms(shape, data)
    sizes = [2 * data.tokens * site.applications * site.inputs * shape.item for site in shape.heads]
    groups = _token_groups(sizes, token_bytes(data.memory))
    square = max((site.inputs**2 for site in shape.heads), default=0) * DOUBLE
    resident = ("base", "weights", "dense copy", "layer cache")
    phases = {
        "scoring": _phase(terms, *resident, "saved for backward", "logits, backward", tokens_of_sites=max(groups)),
        "fitting": _phase(
            terms, *resident, tokens_of_sites=max(groups), moments=FOLDS * square, solving=SOLVING * square
        ),
        "evaluating": _phase(terms, *resident, "passing", "logits, forward"),
        "saving": _phase(terms, *resident[:-1], "copy to write"),
    }
    steps, scoring = sum(site.units for site in shape.heads), 3.0 * len(groups)
    return [
        Need("greedy", phases, steps, scoring * steps, scoring, steps + 1),
        Need("one-shot", phases, steps, scoring + 0.5 * max(steps - 1, 0), 0.5, steps + 1),
    ]


def _rounds(shape: Shape, data: Calibration) -> Need:
    """Elimination: a forward and a backward for each draw of signs, for every group of sites; the dense outputs once;
    a repair front to back in every round."""
    terms = shared_terms(shape, data)
    columns = [site.applications * (site.inputs + DRAWS * site.outputs) for site in shape.sites]
    groups = _token_groups([data.tokens * count * shape.item for count in columns], token_bytes(data.memory))
    widest = max(shape.sites, key=lambda site: site.inputs)
    tokens = data.tokens * widest.applications * (3 * widest.inputs + DRAWS * widest.outputs) * SINGLE
    order = tokens + widest.inputs**2 * (ELIMINATING * DOUBLE + FOLDS * SINGLE)
    sums = FOLDS * max(site.inputs * (site.inputs + site.outputs) for site in shape.sites) * DOUBLE
    stream = data.tokens * shape.width * shape.item
    resident = ("base", "weights", "dense copy", "layer cache", "dense outputs")
    phases = {
        "gathering": _phase(terms, *resident, "saved for backward", "logits, backward", tokens_of_sites=max(groups)),
        "eliminating": _phase(terms, *resident, tokens_of_sites=max(groups), eliminating=order),
        "repairing": _phase(terms, *resident, "passing", activations=stream, moments=sums, solving=sums),
        "saving": _phase(terms, *resident, "copy to write"),
    }
    per_round = len(groups) * (1 + 2.0 * DRAWS) + repair_passes(shape)
    return Need("rounds", phases, ROUNDS, 3.0 + ROUNDS * per_round, per_round, ROUNDS + 1)


def _layerwise(shape: Shape, data: Calibration) -> Need:
    """Layer after layer: the dense one and its pruned copy, the hidden states of both models before it, the targets of
    its sites and the residual streams that these are added to, the sums of one site."""
    terms = shared_terms(shape, data)
    sites_per_layer = -(-len(shape.sites) // max(shape.layers, 1))  # of the largest layer
    tokens = 2 * (data.tokens + data.evaluation * data.length) + 2 * sites_per_layer * data.tokens
    streams = tokens * shape.width * shape.item
    widest = max(shape.sites, key=lambda site: site.inputs)
    size = DOUBLE if widest.inputs <= choose.WIDE else SINGLE
    pairs = widest.inputs * (widest.inputs + widest.outputs) * size
    solving = pairs + widest.inputs * widest.outputs * size
    layer = ("base", "two layers")
    phases = {
        "ordering": _phase(terms, *layer, activations=streams, eliminating=4 * widest.inputs**2 * size),
        "repairing": _phase(terms, *layer, activations=streams, moments=FOLDS * pairs, solving=solving),
        "passing": _phase(terms, *layer, "passing", activations=streams),
        "a table": _phase(terms, "base", "table", activations=streams),
    }
    passes = 3.0 + 2 * sites_per_layer  # widths, dense, pruned; two for each site
    return Need("layerwise", phases, shape.layers, passes, passes / max(shape.layers, 1), 0)
