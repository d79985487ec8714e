"""Dummy inputs with which every attention module of a model runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice, product
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune.hooks.attach import hooks

from .audio_inputs import Sounds
from .block_inputs import block_inputs
from .images import Images
from .module_facts import BATCH, TOKENS, Facts
from .text_inputs import OTHER, TEXT

ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
# Inputs tried on one module; the first that works is used.
MAX_TRIES = 60
MAIN_INPUTS = ("input_ids", "pixel_values", "input_features", "input_values")
# Not an input: the number of embeddings that a tower makes of a layout.
COUNT = "_count"


@dataclass(frozen=True)
class Run:
    """A call: the submodule at `path` ('' is the model itself) with these keyword arguments."""

    path: str
    inputs: dict[str, Any] = field(repr=False)


def attention_modules(model: nn.Module) -> list[str]:
    """The paths of the attention modules, without those that only wrap one."""
    candidates = {path: module for path, module in model.named_modules() if is_attention(module)}

    def wraps(path: str) -> bool:
        return any(inner != path and inner.startswith(f"{path}." if path else "") for inner in candidates)

    return [path for path in candidates if not wraps(path) or has_maps(candidates[path])]


def is_attention(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        return True
    return bool(ATTENTION.search(type(module).__name__)) and any(True for _ in module.parameters())


def has_maps(module: nn.Module) -> bool:
    """Whether a module has at least two direct maps or parameters; a wrapper with an output layer has fewer."""
    maps = sum(1 for child in module.children() if type(child).__name__ in ("Linear", "Conv1d", "Conv2d", "Conv1D"))
    return maps + sum(1 for _ in module.parameters(recurse=False)) >= 2


def sample_runs(model: nn.Module) -> list[Run]:
    """Small inputs for the model, and for submodules where the model does not reach all of its attention."""
    missing = set(attention_modules(model))
    runs: list[Run] = []
    with quiet(model), record_calls(model, missing) as called:
        for path in starting_points(model):
            if path and not any(module_path == path or module_path.startswith(f"{path}.") for module_path in missing):
                continue
            inputs = working_inputs(model, path, called)
            if inputs is not None and (not path or missing & called):
                runs.append(Run(path, inputs))
                missing -= called
    return runs


def starting_points(model: nn.Module) -> list[str]:
    """The paths of the model, of models inside of it, and then of any other module, outermost first."""
    paths = [path for path, _ in model.named_modules() if path]
    inner = [path for path in paths if isinstance(model.get_submodule(path), PreTrainedModel)]
    others = sorted((path for path in paths if path not in set(inner)), key=lambda path: path.count("."))
    return ["", *inner, *others]


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; training modes and the random state are restored afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def record_calls(model: nn.Module, paths: set[str]) -> Iterator[set[str]]:
    """A set to which the paths of modules are added as they run."""
    called: set[str] = set()

    def recorder(path: str) -> Callable[..., None]:
        return lambda module, inputs, output: called.add(path)

    with hooks([(model.get_submodule(path), recorder(path)) for path in paths]):
        yield called


def working_inputs(model: nn.Module, path: str, called: set[str]) -> dict[str, Any] | None:
    module = model.get_submodule(path)
    if type(module).forward is nn.Module.forward or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return None
    facts = Facts(module, model)
    candidates = block_inputs(facts)
    if isinstance(module, PreTrainedModel) or any(name in facts for name in MAIN_INPUTS):
        candidates = chain(whole_inputs(facts), candidates)
    for candidate in islice(candidates, MAX_TRIES):
        inputs = {name: value for name, value in candidate.items() if name != COUNT}
        if any(name not in inputs for name in facts.required()):
            continue
        called.clear()
        if works(module, inputs):
            return add_cross_attention(facts, inputs, called)
    return None


def add_cross_attention(facts: Facts, inputs: dict[str, Any], called: set[str]) -> dict[str, Any]:
    """The inputs with encoder hidden states for cross-attention, if more modules run with them."""
    name = "encoder_hidden_states"
    if name not in facts or name in inputs:
        return inputs
    extended = {**inputs, name: OTHER[name](facts, TOKENS)}
    if "query_embeds" in facts and "query_embeds" not in inputs:
        # Only queries use cross-attention, and they come before the text.
        extended["query_embeds"] = OTHER["query_embeds"](facts, TOKENS)
        extended["attention_mask"] = facts.ones(BATCH, 2 * TOKENS)
    called_before = set(called)
    called.clear()
    if works(facts.module, extended) and len(called) > len(called_before):
        return extended
    called.clear()
    called.update(called_before)
    return inputs


def works(module: nn.Module, inputs: dict[str, Any]) -> bool:
    try:
        module(**inputs)
    except Exception:  # a model may raise any error for inputs that do not fit
        return False
    return True


def whole_inputs(facts: Facts) -> Iterator[dict[str, Any]]:
    """Candidate inputs of every modality that the model accepts, and then of fewer modalities."""
    images = list(islice(Images(facts).layouts(), 24)) or [{}]
    sounds = list(islice(Sounds(facts).layouts(), 24)) or [{}]
    if "input_ids" in facts and images != [{}]:
        images = first_encoded(facts, "get_image_features", images)
    if "input_ids" in facts and sounds != [{}]:
        sounds = first_encoded(facts, "get_audio_features", sounds)
    others = other_inputs(facts)
    for length in facts.lengths() if "input_ids" in facts else [TOKENS]:
        for image, sound in product(images, sounds):
            yield {**text_inputs(facts, length, image, sound), **others, **image, **sound}
        if "input_ids" in facts:
            yield {**text_inputs(facts, length, {}, {}), **others}
            yield {**text_inputs(facts, length, {}, {})}
    for image in images:
        yield {**image, **others}
        yield image
    for sound in sounds:
        yield {**sound, **others}
        yield sound
    yield others
    codebooks = facts.number("num_codebooks", "num_quantizers")
    for number in (codebooks, codebooks + 1) if codebooks and "input_ids" in facts else ():
        ids = facts.ids(facts.vocabulary(), BATCH, TOKENS, number, avoid=facts.special())
        yield {"input_ids": ids}
        yield {"input_ids": ids.transpose(1, 2)}
    if "encoder_hidden_states" in facts:
        others["encoder_hidden_states"] = OTHER["encoder_hidden_states"](facts, TOKENS)
        yield {**text_inputs(facts, TOKENS, {}, {}), **others}
        yield others
    yield {name: maker(facts, TOKENS) for name, maker in {**TEXT, **OTHER}.items() if name in facts.required()}


def other_inputs(facts: Facts) -> dict[str, Any]:
    skipped = (
        {"inputs_embeds", "hidden_states", "query_embeds"} if any(name in facts for name in MAIN_INPUTS) else set()
    )
    names = [name for name in OTHER if name in facts and name not in skipped]
    if "encoder_hidden_states" in names and "encoder_hidden_states" not in facts.required():
        names.remove("encoder_hidden_states")
    # Ids under other names, for models without `input_ids`.
    ids = [name for name in TEXT if name in facts.required() and "input_ids" not in facts and name != "attention_mask"]
    return {name: {**TEXT, **OTHER}[name](facts, TOKENS) for name in [*ids, *names]}


def first_encoded(facts: Facts, method: str, layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first layout that the tower encodes, with the number of embeddings under `COUNT`; all layouts where the
    model has no such method."""
    features = getattr(facts.module, method, None)
    if features is None:
        return layouts
    for layout in layouts:
        try:
            output = features(**layout)
        except Exception:  # as in `works`
            continue
        return [{**layout, COUNT: rows(output, facts) or BATCH * facts.number("num_query_tokens")}]
    return [{}]


def rows(output: Any, facts: Facts) -> int:
    """The number of token embeddings in the output of a tower."""
    try:
        width = facts.module.get_input_embeddings().weight.shape[-1]  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return 0
    output = getattr(output, "pooler_output", None) if getattr(output, "pooler_output", None) is not None else output
    if isinstance(output, torch.Tensor):
        return output.numel() // width if output.shape[-1] == width else 0
    if isinstance(output, list | tuple):
        return sum(
            part.numel() // width for part in output if isinstance(part, torch.Tensor) and part.shape[-1] == width
        )
    return 0


def text_inputs(facts: Facts, length: int, image: dict[str, Any], sound: dict[str, Any]) -> dict[str, Any]:
    """Token ids, with a placeholder for each embedding of an image or audio, and the inputs that depend on them."""
    if "input_ids" not in facts:
        return {}
    ids = facts.ids(facts.vocabulary(), BATCH, length, avoid=facts.special()).cpu()
    parts = [ids[:, :2]]
    kinds = [torch.zeros(BATCH, 2, dtype=torch.long)]
    for layout, kind, names in (
        (image, 1, ("image_token_id", "image_token_index", "image_pad_token_id", "media_placeholder_token_id")),
        (sound, 3, ("audio_token_id", "audio_token_index", "audio_pad_token_id")),
    ):
        count = layout.get(COUNT, 0)
        token = facts.find(*names)
        if token is None and isinstance(table := facts.find("vocabulary_map"), dict):
            token = table.get("<image>")
        if count and isinstance(token, int):
            parts.append(torch.full((BATCH, count // BATCH), token))
            kinds.append(torch.full((BATCH, count // BATCH), kind))
    parts.append(ids[:, 2:])
    kinds.append(torch.zeros(BATCH, length - 2, dtype=torch.long))
    ids = torch.cat(parts, dim=1).to(facts.device)
    inputs = {"input_ids": ids}
    for name in ("mm_token_type_ids", "moe_mm_token_type_ids"):
        if name in facts:
            inputs[name] = torch.cat(kinds, dim=1).to(facts.device)
    for name, maker in TEXT.items():
        if name in facts:
            inputs[name] = maker(facts, ids.shape[1])
    return inputs
