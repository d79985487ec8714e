"""The slow, obvious truth about every criterion, which shares no code with the engine that is tested against it.

One sample at a time and without its padding, in float64 on a copy of the model with eager attention. Gradients of
weights are gradients of weights, a gate is a number that multiplies, attention probabilities are what the softmax
gives. From headprune comes the geometry of the sites alone: which rows of which weight belong to which head, and in
which layer; and the random signs of `repair`, which could as well be others.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

import headprune
from headprune.hooks.module_paths import layer_path
from headprune.signals.objectives import content_seed, token_signs, vector_signs
from headprune.units import Site
from headprune.units.spec import ROLES

IGNORED = -100
SOFTMAX = functional.softmax

Batch = Mapping[str, torch.Tensor]
Sample = dict[str, torch.Tensor]


def without_padding(batch: Batch) -> list[Sample]:
    """Each sample alone, its padding cut off on the encoder's and on the decoder's side, and no mask left."""
    result = []
    size = len(next(iter(batch.values())))
    for row in range(size):
        own = {name: value[row : row + 1] for name, value in batch.items()}
        labels = own.get("labels")
        sides = {"attention_mask": ["input_ids", "token_type_ids"], "decoder_attention_mask": ["decoder_input_ids"]}
        if labels is not None and labels.dim() == 2 and not labels.is_floating_point():
            decoder = "decoder_attention_mask" in own or "decoder_input_ids" in own
            sides["decoder_attention_mask" if decoder else "attention_mask"].append("labels")
        for mask_name, names in sides.items():
            if mask_name in own:
                real = own.pop(mask_name)[0].bool()
                own.update({name: own[name][:, real] for name in names if name in own})
        result.append({name: value.double() if value.is_floating_point() else value for name, value in own.items()})
    return result


@contextmanager
def softmax_replaced(replacement: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Attention scores [batch, heads, queries, keys] go through `replacement`; every other softmax is as ever.

    Eager attention of all families calls this one function once per application of a site, in order of execution.
    """

    def softmax(scores: torch.Tensor, dim: int | None = None, **options: Any) -> torch.Tensor:
        return replacement(scores) if scores.dim() == 4 else SOFTMAX(scores, dim=dim, **options)

    functional.softmax = softmax
    try:
        yield
    finally:
        functional.softmax = SOFTMAX


class Oracle:
    """All criteria of one model on some batches. Scores are float64 [sites x heads], NaN where a head is gone."""

    def __init__(
        self, model: Any, batches: Sequence[Batch], labels: str = "given", *, next_token: bool = False
    ) -> None:
        self.model = copy.deepcopy(model).double().eval()
        self.model.set_attn_implementation("eager")
        self.model.requires_grad_(True)
        self.labels = labels
        self.next_token = next_token  # a language model: each token is predicted by the one before
        self.modules = dict(self.model.named_modules())
        self.sites: list[Any] = self.found_sites()
        self.width = max(site.original for site in self.sites)
        self.batches = [without_padding(batch) for batch in batches]
        self.samples = [sample for samples in self.batches for sample in samples]
        self._maps: list[list[torch.Tensor]] = []
        self._gate_gradients: list[torch.Tensor] = []
        self._logits: dict[int, torch.Tensor] = {}
        self._fits: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def found_sites(self) -> list[Any]:
        return headprune.resolve(self.model)

    def forget(self) -> None:
        """What was computed under other gates."""
        self._maps, self._gate_gradients, self._logits, self._fits = [], [], {}, {}

    # --- what a sample says ---

    def plain_logits(self, sample: Sample) -> torch.Tensor:
        """The logits with their graph, computed once for all that is asked of the gradients of weights."""
        number = next(number for number, known in enumerate(self.samples) if known is sample)
        if number not in self._logits:
            self._logits[number] = self.logits(sample)
        return self._logits[number]

    def logits(self, sample: Sample) -> torch.Tensor:
        """[classes], or [tokens, classes] of the one sample; hidden states where the model has no head."""
        derives_decoder_inputs = self.model.config.is_encoder_decoder and "decoder_input_ids" not in sample
        kept_back = ("own",) if derives_decoder_inputs else ("own", "labels")
        inputs = {name: value for name, value in sample.items() if name not in kept_back}
        if functional.softmax is SOFTMAX:  # some families fall back to float32 there
            with softmax_replaced(lambda scores: SOFTMAX(scores.double(), dim=-1)):
                output = self.model(**inputs)
        else:
            output = self.model(**inputs)
        if "logits_per_image" in output:
            return output.logits_per_image[0]
        return (output.logits if "logits" in output else output.last_hidden_state)[0]

    def targets(self, sample: Sample, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits that are judged and their labels, [n, classes] and [n]."""
        rows = logits.reshape(-1, logits.shape[-1])
        if self.labels == "self":
            return rows, sample.get("own", rows.argmax(-1))
        if self.next_token:
            rows, labels = rows[:-1], sample.get("labels", sample["input_ids"])[0, 1:]
        else:
            labels = sample["labels"].flatten()
        return rows[labels != IGNORED], labels[labels != IGNORED]

    def loss(self, sample: Sample, logits: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.logits(sample) if logits is None else logits
        labels = sample.get("labels")
        if labels is not None and labels.is_floating_point():
            if logits.shape == (1,):
                return (logits - labels).square().sum()
            return functional.binary_cross_entropy_with_logits(logits, labels[0])
        return functional.cross_entropy(*self.targets(sample, logits))

    def norm(self, sample: Sample, logits: torch.Tensor | None = None) -> torch.Tensor:
        return (self.logits(sample) if logits is None else logits).square().sum().sqrt()

    def predictions(self) -> list[int]:
        return [int(self.logits(sample).argmax()) for sample in self.samples]

    # --- where a head is ---

    def blank(self) -> torch.Tensor:
        return torch.full((len(self.sites), self.width), torch.nan, dtype=torch.float64)

    def heads(self) -> Iterator[tuple[Site, int, int]]:
        """(site, original id, position in today's weights) of every head that is left."""
        for site in self.sites:
            for position, head in enumerate(site.kept):
                yield site, head, position

    def weight(self, path: str) -> torch.Tensor:
        """[out, in] whatever the module."""
        module = self.modules[path]
        return module.weight.detach().T if type(module).__name__ == "Conv1D" else module.weight.detach()

    def weight_gradients(self, scalar: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of the weights of all sites, [out, in]; one that had no part in the objective has the gradient 0."""
        kept = [site for site in self.sites if site.kept]
        paths = sorted({path for site in kept for path in (*(site.roles[role].module for role in ROLES), site.o)})
        if not paths:
            return {}
        weights = [self.modules[path].weight for path in paths]
        measured = torch.autograd.grad(scalar, weights, retain_graph=True, allow_unused=True, materialize_grads=True)
        named = zip(paths, measured, strict=True)
        return {path: g.T if type(self.modules[path]).__name__ == "Conv1D" else g for path, g in named}

    def blocks(
        self, site: Site, position: int, weights: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """The head's rows of the Q, K and V weights and its columns of the output weight, or of their gradients."""
        group = position // site.group
        paths = (*(site.roles[role].module for role in ROLES), site.o)
        q, k, v, o = (self.weight(path) if weights is None else weights[path] for path in paths)
        columns = slice(position * site.head_dim, (position + 1) * site.head_dim)
        return {
            "q": q[site.roles["q"].indices([position])],
            "k": k[site.roles["k"].indices([group])],
            "v": v[site.roles["v"].indices([group])],
            "o": o[:, columns],
        }

    # --- criteria ---

    def gnorm(self, objective: str = "logit-norm", aggregation: str = "sample") -> torch.Tensor:
        """Real weight gradients. A batch has one objective: the norm of all its logits, or its mean loss."""
        of_sample = self.norm if objective == "logit-norm" else self.loss
        norms = {role: self.blank() for role in "qkv"}
        for samples in self.batches if aggregation == "batch" else [[sample] for sample in self.samples]:
            values = torch.stack([of_sample(sample, self.plain_logits(sample)) for sample in samples])
            scalar = values.square().sum().sqrt() if objective == "logit-norm" else values.mean()
            gradients = self.weight_gradients(scalar)
            for site, head, position in self.heads():
                blocks = self.blocks(site, position, gradients)
                for role, total in norms.items():
                    total[site.index, head] = total[site.index, head].nan_to_num(0.0) + blocks[role].norm()
        count = len(self.samples)
        return (norms["q"] / count) * (norms["k"] / count) * (norms["v"] / count)

    @contextmanager
    def gates(self, gates: torch.Tensor) -> Iterator[None]:
        handles = []
        for site in self.sites:
            if site.kept:

                def multiply(module: Any, args: tuple[torch.Tensor, ...], site: Site = site) -> Any:
                    heads = args[0].reshape(*args[0].shape[:-1], len(site.kept), site.width)
                    return (heads * gates[site.index, list(site.kept), None]).reshape(args[0].shape), *args[1:]

                handles.append(self.model.get_submodule(site.o).register_forward_pre_hook(multiply))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def gate_gradients(self) -> list[torch.Tensor]:
        """dL/d(gate) of each sample, [sites x heads]."""
        if not self._gate_gradients:
            for sample in self.samples:
                gates = torch.ones(self.blank().shape, dtype=torch.float64, requires_grad=True)
                with self.gates(gates):
                    loss = self.loss(sample)
                self._gate_gradients += torch.autograd.grad(loss, gates, allow_unused=True, materialize_grads=True)
        return self._gate_gradients

    def his(self, *, normalize: bool = False) -> torch.Tensor:
        scores = sum(gradient.abs() for gradient in self.gate_gradients()) / len(self.samples)
        for site in self.sites:
            if normalize and site.kept:
                scores[site.index] /= sum(scores[site.index, head] ** 2 for head in site.kept) ** 0.5
        return self.only_kept(scores)

    def his_by_differences(self, step: float = 1e-5) -> torch.Tensor:
        """HIS without any gradient: the gate of one head moved up and down."""
        total = self.blank()
        with torch.no_grad():
            for site, head, _ in self.heads():
                slopes = []
                for sample in self.samples:
                    values = []
                    for moved in (1 + step, 1 - step):
                        gates = torch.ones(total.shape, dtype=torch.float64)
                        gates[site.index, head] = moved
                        with self.gates(gates):
                            values.append(float(self.loss(sample)))
                    slopes.append(abs(values[0] - values[1]) / (2 * step))
                total[site.index, head] = sum(slopes) / len(slopes)
        return total

    def only_kept(self, scores: torch.Tensor) -> torch.Tensor:
        result = self.blank()
        for site, head, _ in self.heads():
            result[site.index, head] = scores[site.index, head]
        return result

    def taylor(self) -> torch.Tensor:
        losses = [self.loss(sample, self.plain_logits(sample)) for sample in self.samples]
        gradients = self.weight_gradients(torch.stack(losses).mean())
        result = self.blank()
        for site, head, position in self.heads():
            weights, slopes = self.blocks(site, position), self.blocks(site, position, gradients)
            result[site.index, head] = sum((weights[role] * slopes[role]).sum() for role in "qkvo").abs()
        return result

    def magnitude(self) -> torch.Tensor:
        result = self.blank()
        for site, head, position in self.heads():
            blocks = self.blocks(site, position)
            result[site.index, head] = torch.cat([blocks[role].flatten() for role in "qkvo"]).norm()
        return result

    # --- what the other heads of a site cannot express ---

    @contextmanager
    def head_outputs(self) -> Iterator[list[tuple[Site, torch.Tensor]]]:
        """What the output projections see of one sample, [.., tokens, width], application after application."""
        seen: list[tuple[Site, torch.Tensor]] = []
        handles = []
        for site in self.sites:
            if site.kept:

                def see(module: Any, args: tuple[torch.Tensor, ...], site: Site = site) -> None:
                    seen.append((site, args[0]))

                handles.append(self.model.get_submodule(site.o).register_forward_pre_hook(see))
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    def units(self, site: Site) -> list[list[int]]:
        """The columns of the output weight that go together: those of one head, or of a group that shares a KV head."""
        width = site.width * site.group
        return [list(range(start, start + width)) for start in range(0, len(site.kept) * site.width, width)]

    def fits(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """By site: what is subtracted from the outputs first, and which part of each column the other units express.

        Every unit on its own: its columns are regressed on all columns of the others, over the tokens of all samples.
        The ridge is rows of a least-squares problem. The engine adds it to the diagonal of the whole covariance C and
        takes P[:, u] P[u, u]^-1 with P its inverse; by the inverse of a block matrix that is 1 at the unit itself and
        -(C_rr + ridge)^-1 C_ru at the rest r, the same solution, whatever is added to the block of u.
        """
        if self._fits:
            return self._fits
        outputs: dict[int, list[torch.Tensor]] = {}
        for sample in self.samples:
            with torch.no_grad(), self.head_outputs() as seen:
                self.logits(sample)
            for site, values in seen:
                outputs.setdefault(site.index, []).append(values.flatten(0, -2))
        for site in self.sites:
            if not site.kept:
                continue
            values = torch.cat(outputs[site.index])
            has_bias = self.model.get_submodule(site.o).bias is not None
            offset = values.mean(0) if has_bias else torch.zeros_like(values[0])
            values = values - offset
            ridge = 1e-3 * values.square().mean()
            expressed = torch.zeros(values.shape[1], values.shape[1], dtype=torch.float64)
            for own in self.units(site):
                others = [column for column in range(values.shape[1]) if column not in own]
                rows = (len(values) * ridge).sqrt() * torch.eye(len(others), dtype=torch.float64)
                inputs = torch.cat([values[:, others], rows])
                targets = torch.cat([values[:, own], torch.zeros(len(others), len(own), dtype=torch.float64)])
                if others:
                    measured = torch.linalg.lstsq(inputs, targets, driver="gelsd").solution
                    expressed[torch.tensor(others)[:, None], torch.tensor(own)] = measured
            self._fits[site.index] = offset, expressed
        return self._fits

    def residual(self, site: Site, outputs: torch.Tensor) -> torch.Tensor:
        offset, expressed = self.fits()[site.index]
        return (outputs - offset) - (outputs - offset) @ expressed

    def signed_logits(self, sample: Sample) -> torch.Tensor:
        logits = self.logits(sample)
        if logits.dim() == 1 and len(logits) == 1:
            return logits.sum()
        generator = torch.Generator().manual_seed(content_seed(sample))
        if logits.dim() == 1:
            signs = vector_signs(len(logits), generator)
        else:
            signs = token_signs(*logits.shape, generator)
            signs = signs - signs.mean(-1, keepdim=True)
        return (logits * signs.double()).sum()

    def repair(self, *, residual: bool = True) -> torch.Tensor:
        """The mean square of <R, df/dZ>, R all of Z without `residual`; the applications of a tied site add up."""
        total = self.blank().nan_to_num(0.0)
        for sample in self.samples:
            with self.head_outputs() as seen:
                scalar = self.signed_logits(sample)
            outputs = [values for _, values in seen]
            gradients = torch.autograd.grad(scalar, outputs, materialize_grads=True) if outputs else ()
            products = torch.zeros_like(total)
            for (site, values), gradient in zip(seen, gradients, strict=True):
                own = self.residual(site, values.detach()) if residual else values.detach()
                for number, columns in enumerate(self.units(site)):
                    heads = site.kept[number * site.group : (number + 1) * site.group]
                    products[site.index, list(heads)] += (own * gradient)[..., columns].sum()
            total += products.square()
        return self.only_kept(total / len(self.samples))

    def lstsq(self) -> torch.Tensor:
        """The mean of |W R|^2 / |x|^2, x what the layer of the site gives; of a tied layer, its last application."""
        total = self.blank().nan_to_num(0.0)
        for sample in self.samples:
            streams: dict[str, torch.Tensor] = {}
            handles = []
            for path in {layer_path(site.path) for site in self.sites}:

                def keep(module: Any, args: Any, output: Any, path: str = path, streams: Any = streams) -> None:
                    streams[path] = output if isinstance(output, torch.Tensor) else output[0]

                handles.append(self.model.get_submodule(path).register_forward_hook(keep))
            with torch.no_grad(), self.head_outputs() as seen:
                self.logits(sample)
            for handle in handles:
                handle.remove()
            for site, values in seen:
                stream = streams[layer_path(site.path)]
                values = values.reshape(1, -1, values.shape[-1]) if values.dim() == 2 else values
                assert stream.shape[:-1] == values.shape[:-1], "the stream has other tokens than the site"
                own = self.residual(site, values)
                for number, columns in enumerate(self.units(site)):
                    heads = site.kept[number * site.group : (number + 1) * site.group]
                    left_over = own[..., columns] @ self.weight(site.o)[:, columns].T
                    total[site.index, list(heads)] += left_over.square().sum() / stream.square().sum()
        return self.only_kept(total / len(self.samples))

    # --- attention probabilities ---

    def runs(self) -> list[Site]:
        """The sites as one forward runs them, a tied one as often as it is applied."""
        return [site for site in self.sites if site.kept for _ in range(site.applications)]

    def maps(self, sample: Sample, scalar: Callable[[Sample], torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The probabilities of every application, in the graph of the scalar."""
        seen: list[torch.Tensor] = []

        def watch(scores: torch.Tensor) -> torch.Tensor:
            seen.append(SOFTMAX(scores.double(), dim=-1))
            return seen[-1]

        with softmax_replaced(watch):
            value = scalar(sample)
        assert len(seen) == len(self.runs()), "the oracle does not see the attention of every site"
        return seen, value

    def unchanged_maps(self) -> list[list[torch.Tensor]]:
        """The probabilities of each sample's plain run, without gradients."""
        if not self._maps:
            with torch.no_grad():
                self._maps = [self.maps(sample, self.logits)[0] for sample in self.samples]
        return self._maps

    def tis(self) -> torch.Tensor:
        total = self.blank().nan_to_num(0.0)
        for sample in self.samples:
            maps, loss = self.maps(sample, self.loss)
            gradients = torch.autograd.grad(loss, maps, materialize_grads=True) if maps else ()
            signed = torch.zeros_like(total)
            for site, attention, gradient in zip(self.runs(), maps, gradients, strict=True):
                signed[site.index, list(site.kept)] += (attention * gradient).sum(dim=(0, 2, 3)).detach()
            total += signed.abs()
        return self.only_kept(total / len(self.samples))

    def entropies(
        self,
        variant: str = "C",
        epsilon: float = 1e-7,
        *,
        deficit: bool = False,
        kind: str = "shannon",
        order: float = 1.0,
    ) -> torch.Tensor:
        """AE, or AD = 1 - AE / log t for t keys. In float64 only a masked key has a probability of exactly 0, so the
        keys of a row are those above it. A tied site has the mean of its applications."""

        def generalised(probabilities: torch.Tensor) -> torch.Tensor:
            powers = (probabilities**order).sum(-1)
            return powers.log() / (1 - order) if kind == "renyi" else (1 - powers) / (order - 1)

        total = self.blank().nan_to_num(0.0)
        for maps in self.unchanged_maps():
            for site, attention in zip(self.runs(), maps, strict=True):
                left = attention + epsilon if variant == "C" else attention
                inside = attention if variant == "A" else attention + epsilon
                terms = (left * inside.log()).masked_fill(attention == 0, 0.0)
                keys = attention.shape[-1]
                values, largest = -terms[0].sum(-1).mean(-1), math.log(keys)
                if kind != "shannon":
                    values = generalised(attention[0]).mean(-1)
                    largest = float(generalised(torch.full((keys,), 1 / keys, dtype=torch.float64)))
                if deficit:
                    values = 1 - values / largest
                total[site.index, list(site.kept)] += values / site.applications
        return self.only_kept(total / len(self.samples))

    def entropy(self, variant: str = "C", epsilon: float = 1e-7) -> torch.Tensor:
        return -self.entropies(variant, epsilon)

    def deficit(self, variant: str = "C", epsilon: float = 1e-7) -> torch.Tensor:
        return -self.entropies(variant, epsilon, deficit=True)

    def token_counts(self) -> list[torch.Tensor]:
        """The tokens of each sample at every site, [sites x 1]."""
        counts = []
        for sample in self.samples:
            lengths = torch.ones(len(self.sites), 1, dtype=torch.float64)
            with torch.no_grad(), self.head_outputs() as seen:
                self.logits(sample)
            for site, columns in seen:
                lengths[site.index] = columns.shape[:-1].numel()
            counts.append(lengths)
        return counts

    def his_of_a_token(self) -> torch.Tensor:
        """HIS with the inner products of a sample averaged over its tokens: B.1.2 of arXiv 2510.13832."""
        parts = zip(self.gate_gradients(), self.token_counts(), strict=True)
        return self.only_kept(sum((gradient / count).abs() for gradient, count in parts) / len(self.samples))

    def output_norms(self) -> torch.Tensor:
        """The root mean square over tokens of the norm of what a head puts out; a tied site has all its applications
        in one sum."""
        total = self.blank().nan_to_num(0.0)
        for sample, tokens in zip(self.samples, self.token_counts(), strict=True):
            squares = torch.zeros_like(total)
            with torch.no_grad(), self.head_outputs() as seen:
                self.logits(sample)
            for site, columns in seen:
                heads = columns.reshape(-1, len(site.kept), site.width)
                squares[site.index, list(site.kept)] += heads.norm(dim=-1).square().sum(0)
            total += (squares / tokens).sqrt()
        return self.only_kept(total / len(self.samples))

    def hies(self, alpha: float = 0.5, *, raw: bool = False, importance: torch.Tensor | None = None) -> torch.Tensor:
        """AE divided by the log of each sample's length, which is 1 - AD, unless `raw`; `importance` in place of
        HIS."""
        if raw:
            parts = (self.his(), self.entropies())
        else:
            parts = (self.his_of_a_token() if importance is None else importance, 1 - self.entropies(deficit=True))
        scaled = []
        for values in parts:
            known = values[~values.isnan()]
            if not len(known):
                return values
            scaled.append((values - known.min()) / (known.max() - known.min()))
        return alpha * scaled[0] + (1 - alpha) * (1 - scaled[1])

    def label_probability(self, sample: Sample) -> torch.Tensor:
        """F of the attribution; with several labelled tokens, the mean of their probabilities."""
        logits, labels = self.targets(sample, self.logits(sample))
        return SOFTMAX(logits, dim=-1)[torch.arange(len(labels)), labels].mean()

    def attribution(self, steps: int = 20) -> torch.Tensor:
        """The attention of one site is replaced by (k/m) A, A that of the unchanged run; others are as they come."""
        total = self.blank().nan_to_num(0.0)
        for sample, base in zip(self.samples, self.unchanged_maps(), strict=True):
            judged = sample
            if self.labels == "self":  # the label is the unchanged run's, not that of a run with less attention
                with torch.no_grad():
                    judged = {**sample, "own": self.targets(sample, self.logits(sample))[1]}
            for site in self.sites:
                if site.kept:
                    total[site.index, list(site.kept)] += self._largest_attribution(judged, site, base, steps)
        return self.only_kept(total / len(self.samples))

    def _largest_attribution(self, sample: Sample, site: Site, base: list[torch.Tensor], steps: int) -> torch.Tensor:
        runs = self.runs()
        own = [number for number, run in enumerate(runs) if run is site]
        means = {number: torch.zeros_like(base[number]) for number in own}
        for step in range(1, steps + 1):
            leaves: dict[int, torch.Tensor] = {}
            order = iter(range(len(runs)))

            def scale(scores: torch.Tensor, step: int = step, leaves: Any = leaves, order: Any = order) -> torch.Tensor:
                number = next(order)
                if number not in own:
                    return SOFTMAX(scores.double(), dim=-1)
                leaves[number] = (step / steps * base[number]).requires_grad_(True)
                return leaves[number]

            with softmax_replaced(scale):
                probability = self.label_probability(sample)
            for number, gradient in zip(leaves, torch.autograd.grad(probability, [*leaves.values()]), strict=True):
                means[number] += gradient / steps
        best = [(base[n] * means[n]).masked_fill(base[n] == 0, -torch.inf).amax(dim=(0, 2, 3)) for n in own]
        return torch.stack(best).amax(0)


def relative_differences(actual: torch.Tensor, expected: torch.Tensor, *, floor: float = 1e-3) -> torch.Tensor:
    """Per head, |a - e| / (|e| + floor * max|e|): at most 1e-4 means a relative difference of 1e-4 with an absolute
    floor of 1e-7 of the largest score, which is all that float32 knows. Infinite where only one of them is NaN."""
    assert actual.shape == expected.shape
    gone = expected.isnan()
    if not torch.equal(gone, actual.isnan()):
        return torch.full((1,), torch.inf, dtype=torch.float64)
    if gone.all():
        return torch.zeros(1, dtype=torch.float64)
    actual, expected = actual[~gone].double(), expected[~gone].double()
    return (actual - expected).abs() / (expected.abs() + floor * expected.abs().max())
