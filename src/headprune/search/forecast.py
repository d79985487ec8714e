"""What each schedule would need of a model, from its shapes alone: memory at the peak, and passes over the data.

The formula is a sum of named terms, and docs/scale.md shows it with the same names. A phase of a schedule holds some of
them at once; the largest phase is the peak. Terms count what is there by design (weights, activations that a backward
pass needs, moments, what is remembered), not what an allocator keeps for later: measured peaks are in docs/scale.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.hooks.logits import at_once, makes_few
from headprune.hooks.paths import layer_path
from headprune.measure.costs import total_parameters
from headprune.measure.examples import default_tokens
from headprune.search import memory
from headprune.search.layerwise import choose
from headprune.search.memory import cache_bytes, token_bytes
from headprune.signals.moments import FOLDS
from headprune.signals.tokens import DRAWS
from headprune.tasks import task_of
from headprune.units import Site, all_sites
from headprune.units.linear import PLAIN, in_features, out_features

BASE = 540 * 2**20  # Python, torch and transformers with nothing loaded
WIDE = 8  # bytes of a float64, in which moments are summed and solved
SINGLE = 4  # of a float32, which scores are computed in at least
SOLVING = 4  # matrices as large as a site's moments that solving them needs beside them
ELIMINATING = 5  # the same for the order in which units leave

Terms = dict[str, int]  # bytes by name


@dataclass(frozen=True)
class Calibration:
    """How much data there is, and how it is computed."""

    samples: int = 128
    length: int = 128  # tokens of each
    batch_size: int = 32
    evaluation: int = 128  # samples that the model is evaluated on after every step
    dtype: torch.dtype = torch.float32
    memory: int = memory.DEFAULT  # that caches may take

    @property
    def tokens(self) -> int:
        return self.samples * self.length

    @property
    def rows(self) -> int:
        """Samples of one batch."""
        return min(self.batch_size, self.samples)

    @property
    def at_once(self) -> int:
        """Tokens of one batch."""
        return self.rows * self.length


@dataclass(frozen=True)
class SiteShape:
    kind: str
    units: int
    given: int  # columns of its output map
    gives: int  # rows of it
    times: int  # how often a forward pass runs it


@dataclass(frozen=True)
class Shape:
    """What the formula knows of a model."""

    parameters: int
    item: int  # bytes of a number
    stored: int  # the same of the checkpoint
    layers: int
    layer: int  # parameters of the largest layer
    outside: int  # parameters of the largest table outside of layers: tokens by width
    width: int  # of the residual stream
    kept: int  # numbers that a backward pass needs of a token: outputs of all maps, and inputs of output maps
    passing: int  # numbers of a token that are there at once in the widest layer, without a backward pass
    classes: int  # logits of a token
    in_blocks: bool  # whether logits of some tokens can be made at a time
    sites: tuple[SiteShape, ...]

    @classmethod
    def of(cls, model: PreTrainedModel, dtype: torch.dtype) -> Shape:
        """From a model with or without weights; one without a site that can be pruned is refused."""
        sites = all_sites(model)
        times = {layer_path(site.path): site.applications for site in sites}
        outputs = {path: _map_outputs(model.get_submodule(path)) for path in times}
        own = tuple(_shape(model, site) for site in sites)
        given: dict[str, int] = dict.fromkeys(times, 0)
        for site, shape in zip(sites, own, strict=True):
            given[layer_path(site.path)] += shape.given
        inside = {path: total_parameters(model.get_submodule(path)) for path in times}
        ids = {id(p) for path in times for p in model.get_submodule(path).parameters()}
        tables = [p.numel() for p in model.parameters() if id(p) not in ids]
        stored = getattr(model.config, "dtype", None) or torch.float32
        return cls(
            parameters=total_parameters(model),
            item=dtype.itemsize,
            stored=stored.itemsize if isinstance(stored, torch.dtype) else getattr(torch, str(stored)).itemsize,
            layers=len(times),
            layer=max(inside.values()),
            outside=max(tables, default=0),
            width=max(shape.gives for shape in own),
            kept=sum((outputs[path] + given[path]) * times[path] for path in times),
            passing=max(outputs[path] + given[path] for path in times),
            classes=_classes(model),
            in_blocks=makes_few(model) and task_of(model).name == "causal-lm",
            sites=own,
        )

    def of_kind(self, *kinds: str) -> list[SiteShape]:
        return [site for site in self.sites if site.kind in kinds]


@dataclass(frozen=True)
class Need:
    """What one schedule needs. `forwards` are passes over the calibration data, a backward pass counting as two;
    `evaluations` are passes over the data that evaluates, at most."""

    schedule: str
    phases: Mapping[str, Terms]
    steps: int
    forwards: float
    per_step: float
    evaluations: int

    @property
    def phase(self) -> str:
        """The one that needs most."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def terms(self) -> Terms:
        return self.phases[self.phase]

    @property
    def memory(self) -> int:
        return sum(self.terms.values())

    def to_json(self) -> dict[str, Any]:
        fields = ("schedule", "memory", "phase", "terms", "steps", "per_step", "forwards", "evaluations")
        return {
            **{name: getattr(self, name) for name in fields},
            "phases": {n: dict(t) for n, t in self.phases.items()},
        }


def plan(model: PreTrainedModel, data: Calibration) -> list[Need]:
    """What greedy, one-shot, rounds and sweep need of this model, which may be without weights."""
    shape = Shape.of(model, data.dtype)
    return [greedy(shape, data), one_shot(shape, data), rounds(shape, data), sweep(shape, data)]


def tokens_in(model: PreTrainedModel, max_length: int) -> int:
    """Tokens of a sample: of a text as many as are asked for, if the model takes as many."""
    if model.main_input_name != "input_ids":
        return default_tokens(model)
    return min(max_length, getattr(model.config.get_text_config(), "max_position_embeddings", None) or max_length)


# --- terms, in bytes; docs/scale.md has one row for each ---


def weights(shape: Shape) -> Terms:
    """The model, and the dense one that it is compared with in the end."""
    size = shape.parameters * shape.item
    return {"base": BASE, "weights": size, "dense copy": size}


def remembered(shape: Shape, tokens: int, limit: int) -> int:
    """Outputs of layers, for passes that need not compute them again."""
    return min(limit, shape.layers * tokens * shape.width * shape.item)


def evaluated(shape: Shape, data: Calibration) -> Terms:
    return {"remembered": remembered(shape, data.evaluation * data.length, cache_bytes(data.memory))}


def passing(shape: Shape, data: Calibration) -> Terms:
    """A batch on its way through the widest layer."""
    return {"passing": data.at_once * shape.passing * shape.item}


def forward(shape: Shape, data: Calibration) -> Terms:
    """The same, and what comes out."""
    return {**passing(shape, data), "logits": 2 * _logits(shape, data)}


def backward(shape: Shape, data: Calibration) -> Terms:
    """What a batch leaves in all layers for the way back, its logits and the gradients there; where logits come in
    blocks, those at the hidden states are gathered."""
    logits = _logits(shape, data)
    gathered = 0 if logits == data.at_once * shape.classes * shape.item else data.at_once * shape.width * shape.item
    return {"kept for backward": data.at_once * shape.kept * shape.item, "logits": 3 * logits + gathered}


def moments(sites: Sequence[SiteShape]) -> Terms:
    """Of the widest site, and what solving them needs."""
    square = max((site.given**2 for site in sites), default=0)
    return {"moments": FOLDS * square * WIDE, "solving": SOLVING * square * WIDE}


def tokens_of(shape: Shape, data: Calibration, *kinds: str, at_inputs: bool) -> list[int]:
    """What is kept of all tokens, of each group of sites under the limit: inputs of output maps, and gradients there or
    at their outputs. Every group takes passes of its own."""
    groups = [0]
    for site in shape.of_kind(*kinds):
        columns = 2 * site.given if at_inputs else site.given + DRAWS * site.gives
        size = data.tokens * site.times * columns * shape.item
        if groups[-1] and groups[-1] + size > token_bytes(data.memory):
            groups.append(0)
        groups[-1] += size
    return groups


def dense_outputs(shape: Shape, data: Calibration) -> Terms:
    """Of every site and token: what the dense model gives there, and the stream that this is added to."""
    return {"dense outputs": 2 * data.tokens * sum(site.gives * site.times for site in shape.sites) * shape.item}


def eliminating(sites: Sequence[SiteShape], data: Calibration) -> Terms:
    """The order of the widest site: its tokens as they are, centred and weighted, the gradients at its outputs, and
    matrices of its columns."""
    widest = max(sites, key=lambda site: site.given)
    seen = data.tokens * widest.times * (3 * widest.given + DRAWS * widest.gives) * SINGLE
    return {"eliminating": seen + widest.given**2 * (ELIMINATING * WIDE + FOLDS * SINGLE)}


def repairing(sites: Sequence[SiteShape]) -> Terms:
    """Sums for the widest site, and their solution."""
    widest = max(sites, key=lambda site: site.given * (site.given + site.gives))
    pairs = widest.given * (widest.given + widest.gives) * WIDE
    return {"moments": FOLDS * pairs, "solving": FOLDS * pairs}


def _logits(shape: Shape, data: Calibration) -> int:
    """Those that are there together."""
    if not shape.in_blocks:
        return data.at_once * shape.classes * shape.item
    return at_once(data.rows, data.length, shape.classes) * shape.item


# --- schedules ---


def greedy(shape: Shape, data: Calibration) -> Need:
    """A forward and a backward for the scores of every group of sites, after every unit. Where there is one group, its
    tokens serve the repair."""
    steps = sum(site.units for site in shape.of_kind("heads"))
    scored = scoring_passes(shape, data)
    return Need("greedy", _unit_by_unit(shape, data), steps, scored * steps, scored, steps + 1)


def scoring_passes(shape: Shape, data: Calibration) -> float:
    return 3.0 * len(tokens_of(shape, data, "heads", at_inputs=True))


def one_shot(shape: Shape, data: Calibration) -> Need:
    """Scores once; then every repair takes a pass as far as its site, which is half a pass on average."""
    steps = sum(site.units for site in shape.of_kind("heads"))
    return Need(
        "one-shot",
        _unit_by_unit(shape, data),
        steps,
        scoring_passes(shape, data) + 0.5 * max(steps - 1, 0),
        0.5,
        steps + 1,
    )


def _unit_by_unit(shape: Shape, data: Calibration) -> dict[str, Terms]:
    held = {**weights(shape), **evaluated(shape, data)}
    seen = {"tokens of sites": max(tokens_of(shape, data, "heads", at_inputs=True))}
    return {
        "scoring": {**held, **seen, **backward(shape, data)},
        "fitting": {**held, **seen, **moments(shape.of_kind("heads"))},
        "evaluating": {**held, **forward(shape, data)},
        "saving": {**weights(shape), **_written(shape)},
    }


def rounds(shape: Shape, data: Calibration, count: int = 6) -> Need:
    """Elimination: a forward and a backward for each draw of signs, for every group of sites; the dense outputs once;
    a repair front to back in every round."""
    groups = tokens_of(shape, data, "heads", "neurons", at_inputs=False)
    seen = {"tokens of sites": max(groups)}
    held = {**weights(shape), **evaluated(shape, data), **dense_outputs(shape, data)}
    streams = data.tokens * shape.width * shape.item
    scored = len(groups) * (1 + 2.0 * DRAWS)
    repaired = repair_passes(shape)
    return Need(
        "rounds",
        {
            "gathering": {**held, **seen, **backward(shape, data)},
            "eliminating": {**held, **seen, **eliminating(shape.sites, data)},
            "repairing": {**held, "activations": streams, **repairing(shape.sites), **passing(shape, data)},
            "saving": {**held, **_written(shape)},
        },
        count,
        3.0 + count * (scored + repaired),
        scored + repaired,
        count + 1,
    )


def repair_passes(shape: Shape) -> float:
    """Of a repair front to back: every layer runs for either site in it and once repaired."""
    return len(shape.sites) / max(shape.layers, 1) + 1


def sweep(shape: Shape, data: Calibration) -> Need:
    """Layer after layer: the dense one and what becomes of it, the stream of both models before it, what its sites are
    to give and what that is added to, one site's sums."""
    most = -(-len(shape.sites) // max(shape.layers, 1))  # sites of a layer
    streams = 2 * (data.tokens + data.evaluation * data.length) + 2 * most * data.tokens
    held = {"base": BASE, "activations": streams * shape.width * shape.item}
    layer = {**held, "two layers": 2 * shape.layer * shape.item}
    passes_of_all = 3.0 + 2 * most  # widths, dense, pruned; two for each site
    widest = max(shape.sites, key=lambda site: site.given)
    size = WIDE if widest.given <= choose.WIDE else SINGLE
    pairs = widest.given * (widest.given + widest.gives) * size
    return Need(
        "layerwise",
        {
            "ordering": {**layer, "eliminating": 4 * widest.given**2 * size},
            "repairing": {**layer, "moments": FOLDS * pairs, "solving": pairs + widest.given * widest.gives * size},
            "passing": {**layer, "passing": data.at_once * shape.passing * shape.item},
            "a table": {**held, "table": shape.outside * shape.item},
        },
        shape.layers,
        passes_of_all,
        passes_of_all / max(shape.layers, 1),
        0,
    )


def _written(shape: Shape) -> Terms:
    """A copy in the precision of the checkpoint, where that is another."""
    return {"copy to write": 0 if shape.stored == shape.item else shape.parameters * shape.stored}


# --- shapes ---


def _shape(model: PreTrainedModel, site: Site) -> SiteShape:
    output: Any = model.get_submodule(site.o)
    return SiteShape(site.kind, site.size // site.group, in_features(output), out_features(output), site.applications)


def _map_outputs(layer: torch.nn.Module) -> int:
    """Numbers that the linear maps of a layer give for a token."""
    return sum(out_features(module) for module in layer.modules() if isinstance(module, PLAIN))


def _classes(model: PreTrainedModel) -> int:
    """Logits of every token; none where a model gives one answer per text."""
    output = model.get_output_embeddings()
    return 0 if output is None else out_features(output)
