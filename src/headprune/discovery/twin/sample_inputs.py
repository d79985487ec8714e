"""Runs that reach every attention module of a model."""

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
from .signature import BATCH, TOKENS, Facts
from .text_inputs import OTHER, TEXT

ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
# Tries of one module, of which the first that works is taken.
TRIES = 60
MAIN_INPUTS = ("input_ids", "pixel_values", "input_features", "input_values")
# Not an input, but the number of embeddings that a layout becomes.
COUNT = "_count"


@dataclass(frozen=True)
class Run:
    """A call: the submodule at `path` ('' is the model itself) with these keyword arguments."""

    path: str
    inputs: dict[str, Any] = field(repr=False)


def attention_modules(model: nn.Module) -> list[str]:
    """The paths of the modules that attend, without those that only wrap one."""
    named = {path: module for path, module in model.named_modules() if is_attention(module)}

    def wraps(path: str) -> bool:
        return any(other != path and other.startswith(f"{path}." if path else "") for other in named)

    return [path for path in named if not wraps(path) or owns_maps(named[path])]


def is_attention(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        return True
    return bool(ATTENTION.search(type(module).__name__)) and any(True for _ in module.parameters())


def owns_maps(module: nn.Module) -> bool:
    """Whether a module has at least two maps or tables of its own, as wrappers with an output layer have not."""
    own = sum(1 for child in module.children() if type(child).__name__ in ("Linear", "Conv1d", "Conv2d", "Conv1D"))
    return own + sum(1 for _ in module.parameters(recurse=False)) >= 2


def sample_runs(model: nn.Module) -> list[Run]:
    """Small inputs on which the model runs, and where it does not reach all of its attention, parts of it do."""
    missing = set(attention_modules(model))
    runs: list[Run] = []
    with quiet(model), watching(model, missing) as touched:
        for path in starting_points(model):
            if path and not any(one == path or one.startswith(f"{path}.") for one in missing):
                continue
            inputs = working_inputs(model, path, touched)
            if inputs is not None and (not path or missing & touched):
                runs.append(Run(path, inputs))
                missing -= touched
    return runs


def starting_points(model: nn.Module) -> list[str]:
    """The model, models inside of it, and then any other module, from the outside in."""
    paths = [path for path, _ in model.named_modules() if path]
    inner = [path for path in paths if isinstance(model.get_submodule(path), PreTrainedModel)]
    others = sorted((path for path in paths if path not in set(inner)), key=lambda path: path.count("."))
    return ["", *inner, *others]


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Evaluation without gradients, with modes and the random state as they were afterwards."""
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
def watching(model: nn.Module, paths: set[str]) -> Iterator[set[str]]:
    """The paths of those modules that have run since the set was cleared."""
    touched: set[str] = set()

    def note(path: str) -> Callable[..., None]:
        return lambda module, inputs, output: touched.add(path)

    with hooks([(model.get_submodule(path), note(path)) for path in paths]):
        yield touched


def working_inputs(model: nn.Module, path: str, touched: set[str]) -> dict[str, Any] | None:
    module = model.get_submodule(path)
    if type(module).forward is nn.Module.forward or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return None
    facts = Facts(module, model)
    tries = block_inputs(facts)
    if isinstance(module, PreTrainedModel) or any(name in facts for name in MAIN_INPUTS):
        tries = chain(whole_inputs(facts), tries)
    for tried in islice(tries, TRIES):
        inputs = {name: value for name, value in tried.items() if name != COUNT}
        if any(name not in inputs for name in facts.required()):
            continue
        touched.clear()
        if works(module, inputs):
            return with_memory(facts, inputs, touched)
    return None


def with_memory(facts: Facts, inputs: dict[str, Any], touched: set[str]) -> dict[str, Any]:
    """The same with something to attend to across, if that reaches more."""
    name = "encoder_hidden_states"
    if name not in facts or name in inputs:
        return inputs
    more = {**inputs, name: OTHER[name](facts, TOKENS)}
    if "query_embeds" in facts and "query_embeds" not in inputs:
        # Only queries attend across, and they come before the text.
        more["query_embeds"] = OTHER["query_embeds"](facts, TOKENS)
        more["attention_mask"] = facts.ones(BATCH, 2 * TOKENS)
    before = set(touched)
    touched.clear()
    if works(facts.module, more) and len(touched) > len(before):
        return more
    touched.clear()
    touched.update(before)
    return inputs


def works(module: nn.Module, inputs: dict[str, Any]) -> bool:
    try:
        module(**inputs)
    except Exception:  # whatever a model says to inputs that do not fit it
        return False
    return True


def whole_inputs(facts: Facts) -> Iterator[dict[str, Any]]:
    """Inputs of every kind that the model takes, and then of fewer kinds."""
    images = list(islice(Images(facts).layouts(), 24)) or [{}]
    sounds = list(islice(Sounds(facts).layouts(), 24)) or [{}]
    if "input_ids" in facts and images != [{}]:
        images = seen_by(facts, "get_image_features", images)
    if "input_ids" in facts and sounds != [{}]:
        sounds = seen_by(facts, "get_audio_features", sounds)
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
    books = facts.number("num_codebooks", "num_quantizers")
    for number in (books, books + 1) if books and "input_ids" in facts else ():
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
    # Ids under other names, of models that have no `input_ids` to go with.
    asked = [
        name for name in TEXT if name in facts.required() and "input_ids" not in facts and name != "attention_mask"
    ]
    return {name: {**TEXT, **OTHER}[name](facts, TOKENS) for name in [*asked, *names]}


def seen_by(facts: Facts, method: str, layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first layout that the model makes features of, with their number under `COUNT`; all if it does not say."""
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
    """How many embeddings of tokens there are in what a tower returned."""
    try:
        width = facts.module.get_input_embeddings().weight.shape[-1]  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return 0
    output = getattr(output, "pooler_output", None) if getattr(output, "pooler_output", None) is not None else output
    if isinstance(output, torch.Tensor):
        return output.numel() // width if output.shape[-1] == width else 0
    if isinstance(output, list | tuple):
        return sum(one.numel() // width for one in output if isinstance(one, torch.Tensor) and one.shape[-1] == width)
    return 0


def text_inputs(facts: Facts, length: int, image: dict[str, Any], sound: dict[str, Any]) -> dict[str, Any]:
    """Ids, with a placeholder for each embedding of an image or a sound, and what goes with them."""
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
