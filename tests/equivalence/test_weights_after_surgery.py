"""What surgery must leave as it was: kinds of modules, dtype, device, requires_grad, tying, warnings and errors."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

import headprune
from helpers import (
    TOLERANCE,
    VARIANTS,
    difference,
    families,
    flat,
    gated_outputs,
    gates_without,
    kept_heads,
    outputs,
    pruned,
    some_heads,
)
from zoo import ZOO, Entry


def tied_groups(model: nn.Module) -> set[frozenset[str]]:
    """The sets of names that stand for one and the same parameter."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("entry", families())
def test_plain_modules_of_the_right_size_are_left(entry: Entry, variant: str) -> None:
    model, _ = pruned(entry, variant)
    for site in headprune.resolve(model):
        if not site.kept:
            continue
        for path in (*site.maps, site.o):
            module = model.get_submodule(path)
            conv1d = "conv1d" in entry.tags
            assert type(module) is (Conv1D if conv1d else nn.Linear)
            sizes = (module.nx, module.nf) if conv1d else (module.out_features, module.in_features)
            assert tuple(module.weight.shape) == sizes
            assert module.weight.is_contiguous()
            assert module.bias is None or module.bias.shape == (sizes[1] if conv1d else sizes[0],)
        assert model.get_submodule(site.roles["q"].module).weight.numel() > 0


@pytest.mark.parametrize("entry", families())
def test_a_site_without_heads_has_no_matrix_left(entry: Entry) -> None:
    model, _ = pruned(entry, "first-site-gone")
    site = headprune.resolve(model)[0]
    inside = [parameter for parameter in model.get_submodule(site.path).parameters() if parameter.dim() > 1]
    tables = 1 if entry.name in ("t5", "mt5") else 0  # its stack needs the position bias of the first site
    assert len(inside) == tables
    assert model.get_submodule(site.o).weight is None
    assert site.maps
    assert not {*site.maps} & {name for name, _ in model.named_modules()}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("entry", families())
def test_dtype_and_requires_grad_are_kept(entry: Entry, variant: str) -> None:
    model = entry.build()
    for place, parameter in enumerate(model.parameters()):  # mixed on purpose: nothing is run with them
        parameter.requires_grad_(place % 3 != 0)
        parameter.data = parameter.data.to((torch.float32, torch.float64, torch.bfloat16)[place % 3])
    before = {name: (p.dtype, p.device, p.requires_grad) for name, p in model.named_parameters()}
    headprune.remove(model, VARIANTS[variant](headprune.resolve(model)))
    after = {name: (p.dtype, p.device, p.requires_grad) for name, p in model.named_parameters()}
    assert after == {name: before[name] for name in after}


@pytest.mark.parametrize("entry", families())
def test_a_model_without_memory_can_be_pruned(entry: Entry) -> None:
    """On the meta device there are shapes only: enough to plan, to count, and to load into."""
    real, heads = pruned(entry)
    with torch.device("meta"):
        model = type(real)(type(real.config).from_dict(entry.build().config.to_dict()))
    headprune.remove(model, heads)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in real.named_parameters()}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("entry", families())
def test_tied_embeddings_stay_tied(entry: Entry, variant: str) -> None:
    before = tied_groups(entry.build())
    model, _ = pruned(entry, variant)
    assert tied_groups(model) == before
    if entry.name in ("gpt2", "opt", "bloom", "t5", "bart", "whisper"):
        assert any("lm_head.weight" in group or "proj_out.weight" in group for group in before)


def llama_with_tied_queries() -> Any:
    model = ZOO["llama"].build()
    first, second, _ = (layer.self_attn for layer in model.model.layers)
    second.q_proj.weight = first.q_proj.weight
    return model


def test_two_modules_that_share_a_weight_stay_tied() -> None:
    model, dense, batch = llama_with_tied_queries(), llama_with_tied_queries(), ZOO["llama"].batch(1)
    heads = [(0, 1), (1, 1), (0, 3), (1, 3), (2, 0)]
    expected = gated_outputs(dense, batch, gates_without(headprune.resolve(dense), heads))
    headprune.remove(model, heads)
    assert difference(expected, outputs(model, batch)) <= TOLERANCE
    assert model.model.layers[1].self_attn.q_proj.weight is model.model.layers[0].self_attn.q_proj.weight


def test_tied_projections_that_would_keep_other_heads_are_refused() -> None:
    model = llama_with_tied_queries()
    before = dict(model.named_parameters())
    with pytest.raises(headprune.HeadpruneError, match=r"tied to another projection.*untie them first"):
        headprune.remove(model, [(0, 1), (1, 2)])
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def llama_with_one_attention_twice() -> Any:
    model = ZOO["llama"].build()
    model.model.layers[2].self_attn = model.model.layers[0].self_attn
    return model


def test_a_module_that_is_used_twice_is_one_site() -> None:
    model, dense, batch = llama_with_one_attention_twice(), llama_with_one_attention_twice(), ZOO["llama"].batch(1)
    sites = headprune.resolve(model)
    assert [site.applications for site in sites] == [2, 1]
    heads = some_heads(sites)
    expected = gated_outputs(dense, batch, gates_without(sites, heads), use_cache=False)
    assert difference(expected, outputs(dense, batch, use_cache=False)) > 1e-3
    headprune.remove(model, heads)
    assert difference(expected, outputs(model, batch, use_cache=False)) <= TOLERANCE
    assert model.model.layers[2].self_attn is model.model.layers[0].self_attn
    headprune.remove(model, [head for head in flat(sites[0].units()) if head not in heads])
    assert kept_heads(model)[0] == ()
    assert model.model.layers[2].self_attn is model.model.layers[0].self_attn


def test_modes_of_training_are_left_alone() -> None:
    model, batch = ZOO["bert"].build(), ZOO["bert"].batch(0)
    model.train()
    model.bert.encoder.layer[1].eval()
    before = [module.training for module in model.modules()]
    headprune.remove(model, [(0, 0), (2, 1)], verify=batch)
    assert [module.training for module in model.modules()] == before


@contextmanager
def logged() -> Iterator[list[str]]:
    """What transformers says through its logger meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def test_warnings_of_transformers_are_not_hidden(tmp_path: Any) -> None:
    """The same call warns the same, before and after surgery, and nothing is switched off on the way."""
    entry, level, filters = ZOO["gpt2"], logging.getLogger("transformers").level, list(warnings.filters)
    prompt = {"input_ids": entry.batch(0)["input_ids"], "max_new_tokens": 2, "max_length": 5, "pad_token_id": None}
    entry.build().generate(**prompt)  # some warnings come once per process
    with logged() as dense_lines:
        entry.build().generate(**prompt)
    with logged() as lines:
        model, _ = pruned(entry)
        model.generate(**prompt)
    assert any("max_new_tokens" in line for line in dense_lines)
    assert [line for line in lines if "must be" not in line] == [line for line in dense_lines if "must be" not in line]
    headprune.save(pruned(ZOO["bert"])[0], tmp_path / "saved")
    with logged() as lines:
        headprune.load(tmp_path / "saved", model_class=transformers.BertModel)  # transformers reports what is left over
    assert any("classifier.weight" in line and "UNEXPECTED" in line for line in lines)
    assert logging.getLogger("transformers").level == level
    assert list(warnings.filters) == filters


def test_errors_of_transformers_are_not_hidden() -> None:
    model, _ = pruned(ZOO["bert"], "first-site-gone")
    messages = []
    for one in (ZOO["bert"].build(), model):
        with pytest.raises(ValueError, match="input_ids") as error:
            one()
        messages.append(str(error.value))
    assert messages[0] == messages[1]
