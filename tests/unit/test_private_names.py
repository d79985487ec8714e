"""Private names of other packages that headprune uses: each is still there, and none is used that is not listed here.

They may go with any release of these packages. Then the test of that name fails, and says what to do instead.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from rooms import FILES, ROOT, room_of


class Private(NamedTuple):
    name: str  # an attribute, or the dotted path of a module
    owner: Callable[[], Any] | None  # what has the attribute; None for a module
    instead: str  # what to do when it has gone


def linear() -> nn.Module:
    return nn.Linear(2, 2)


def config() -> Any:
    return transformers.BertConfig()


def trainer() -> Any:
    return transformers.Trainer


def pretrained() -> Any:
    return transformers.PreTrainedModel


def offloaded() -> nn.Module:
    """A module as accelerate makes it where weights are on disk."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    return add_hook_to_module(linear(), ModelHook())


def source(module: str) -> Any:
    """A module's text, for attributes that only its code sets: they are looked for as names in it."""
    text = inspect.getsource(importlib.import_module(module))
    names = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    names |= {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
    attributes = dict.fromkeys((name for name in names if isinstance(name, str)), True)
    return type("Names", (), {**attributes, "__module__": module})


MODULE = "there is torch.nn.Module's public API: named_parameters, named_buffers, named_children, register_*"
CHECKPOINTS = "save and load in a TrainerCallback (on_save) and in train(resume_from_checkpoint=...)"
OWN_MODEL = "see how transformers' own modeling files declare it, and change models/all_attention/modeling.py"
PRIVATE = (
    # torch
    Private("torch._inductor.cpp_builder", None, "look for a C++ compiler with shutil.which"),
    Private("torch._subclasses.fake_tensor", None, "count FLOPs on the meta device, or under torch.export"),
    Private("torch.utils._python_dispatch", None, "count tensors with a TorchFunctionMode"),
    Private("torch.utils._pytree", None, "walk tuples, lists and dicts by hand"),
    Private("torch.utils._sympy.value_ranges", None, "read the ranges of dimensions as numbers from their text"),
    Private("_inductor", lambda: torch, "find where PyTorch now has AOTInductor"),
    Private("aoti_compile_and_package", lambda: torch._inductor, "find where PyTorch now has AOTInductor"),
    Private("aoti_load_package", lambda: torch._inductor, "find where PyTorch now has AOTInductor"),
    Private("_ConvNd", lambda: nn.modules.conv, "name Conv1d, Conv2d and Conv3d"),
    Private("_NormBase", lambda: nn.modules.batchnorm, "name BatchNorm1d to 3d and InstanceNorm1d to 3d"),
    Private("_grouped_mm", lambda: torch.ops.aten, "count the operation that layers of experts then call"),
    Private("_is_all_true", lambda: torch.ops.aten, "drop its translation if torch.onnx has one of its own"),
    Private("_version", lambda: torch.zeros(1), "keep a digest of a tensor to see whether it has been written to"),
    Private("_parameters", linear, MODULE),
    Private("_buffers", linear, MODULE),
    Private("_modules", linear, MODULE),
    Private("_forward_hooks", linear, "run FLOP counts and training on a copy of the model that nobody has hooked"),
    Private("_forward_pre_hooks", linear, "run FLOP counts on a copy of the model that nobody has hooked"),
    Private("_apply", lambda: nn.Module, "keep gates in float32 by a check before each forward"),
    Private(
        "_reset_parameters", lambda: nn.MultiheadAttention, "initialise the projections in hooks/torch_attention.py"
    ),
    Private(
        "_qkv_same_embed_dim",
        lambda: nn.MultiheadAttention(4, 2),
        "find how nn.TransformerEncoderLayer now decides to take its fused path, and switch that off",
    ),
    # transformers
    Private("_attn_implementation", config, "use model.set_attn_implementation and its public getter"),
    Private("_encode_special_floats", config, "find how configs now write an infinity to config.json"),
    Private("_name_or_path", config, "hand the folder that a model was loaded from along with it"),
    Private("_out_indices", transformers.DinatConfig, "set the public out_indices of backbones"),
    Private("_out_features", transformers.DinatConfig, "set the public out_features of backbones"),
    Private(
        "_heterogeneity_spec",
        lambda: source("transformers.integrations.heterogeneity.configuration_utils"),
        "find how configs now say it",
    ),
    Private("_is_hf_initialized", lambda: source("transformers.modeling_utils"), "find what initialize_weights skips"),
    Private(
        "_hf_peft_config_loaded", lambda: source("transformers.integrations.peft"), "drop it from training/lora.py"
    ),
    Private(
        "_output_capturing_hooks_installed", lambda: source("transformers.utils.output_capturing"), "drop RECORDERS"
    ),
    Private(
        "_model_mapping", lambda: modeling_auto.AutoModel, "use the MODEL_..._MAPPING dictionaries of modeling_auto"
    ),
    Private("_keys_to_ignore_on_load_missing", pretrained, "read missing_keys of output_loading_info instead"),
    Private(
        "_get_feat_extract_output_lengths",
        lambda: transformers.Wav2Vec2ForCTC,
        "compute the number of frames from the strides in the config",
    ),
    Private(
        "_get_subsampling_output_length",
        lambda: transformers.ParakeetForCTC,
        "compute the number of frames from the strides in the config",
    ),
    Private("_n_gpu", lambda: source("transformers.training_args"), "limit CUDA_VISIBLE_DEVICES to one device"),
    Private("_save", trainer, CHECKPOINTS),
    Private("_load_from_checkpoint", trainer, CHECKPOINTS),
    Private("_init_weights", pretrained, OWN_MODEL),
    Private("_no_split_modules", pretrained, OWN_MODEL),
    Private("_skip_keys_device_placement", pretrained, OWN_MODEL),
    Private("_supports_flash_attn", pretrained, OWN_MODEL),
    Private("_supports_flex_attn", pretrained, OWN_MODEL),
    Private("_supports_sdpa", pretrained, OWN_MODEL),
    Private("_supports_attention_backend", pretrained, OWN_MODEL),
    Private("_can_compile_fullgraph", pretrained, OWN_MODEL),
    Private("_can_record_outputs", pretrained, OWN_MODEL),
    Private("_tied_weights_keys", pretrained, OWN_MODEL),
    # accelerate, and Python's gettext
    Private("_hf_hook", offloaded, "ask accelerate how a module's AlignDevicesHook is found"),
    Private("_old_forward", offloaded, "ask accelerate how a module's forward without hooks is found"),
    Private("_catalog", lambda: source("gettext"), "read Django's .mo files with another reader"),
)
# Names that need no test: os._exit is documented, and only older releases of transformers give configs a _commit_hash
# (without it, checkpoint/processors.py takes the newest revision in the cache).
UNTESTED = {"_exit", "_commit_hash"}


TREES = {file: ast.parse(file.read_text()) for file in FILES}


def imported_from(module: str) -> set[str]:
    """Names that headprune imports from a module."""
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == module]
    return {alias.name for node in froms for alias in node.names}


@pytest.mark.parametrize("private", PRIVATE, ids=[private.name for private in PRIVATE])
def test_a_private_name_is_still_there(private: Private) -> None:
    word = re.compile(rf"(?<!\w){re.escape(private.name)}(?!\w)")
    users = [str(file.relative_to(ROOT)) for file in FILES if word.search(file.read_text())]
    assert users, f"nobody uses {private.name} any more: take it off the list"
    if private.owner is None:
        module = importlib.import_module(private.name)
        there = all(hasattr(module, name) for name in imported_from(private.name))
    else:
        there = hasattr(private.owner(), private.name)
    assert there, f"{private.name} has gone, and is used in {', '.join(users)}: {private.instead}"


def package_of(private: Private) -> str:
    """The package that a name belongs to."""
    if private.owner is None or private.owner is offloaded:
        return "accelerate" if private.owner else private.name.split(".")[0]
    made = private.owner()
    if isinstance(made, ModuleType):
        return made.__name__.split(".")[0]
    return (made if isinstance(made, type) else type(made)).__module__.split(".")[0]


def test_packages_with_private_names_have_an_upper_bound() -> None:
    """A next major version may drop them, and is not installed before somebody has looked."""
    project = (ROOT.parents[1] / "pyproject.toml").read_text()
    packages = {package_of(private) for private in PRIVATE} - set(sys.stdlib_module_names)
    assert packages == {"torch", "transformers", "accelerate"}
    for package in packages:
        (bounds,) = re.findall(rf'"{package}(>=[^"]*)"', project)
        lines = [line for line in project.splitlines() if f'"{package}{bounds}"' in line]
        assert re.fullmatch(r">=[\d.]+,<\d+", bounds), f"{package}{bounds} has no upper bound"
        assert all("  # " in line for line in lines), f"the bound of {package} has no reason beside it"


# --- none is used that is not listed ---


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def defined_by_classes(tree: ast.AST) -> Iterator[str]:
    """Names of methods, class attributes, and attributes that methods set on their own object."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
                yield from (target.id for target in targets if isinstance(target, ast.Name))
                yield from [part.name] if isinstance(part, ast.FunctionDef) else []
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr


def private_names(tree: ast.AST) -> Iterator[str]:
    """Private names in imports of other packages, and all private attributes, also those in getattr and the like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            names = [module] if module else [alias.name for alias in node.names]
            names += [alias.name for alias in node.names] if module else []
            if not any(name.startswith("headprune") for name in names):
                yield from (name for name in names if any(map(is_private, name.split("."))))
        elif isinstance(node, ast.Attribute):
            yield from [node.attr] if is_private(node.attr) else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and "attr" in node.func.id:
            texts = [part.value for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            yield from (text for text in texts if is_private(text))


def overridden(tree: ast.Module, module: str) -> Iterator[str]:
    """Private names that the module's classes define, and their bases in other packages, too."""
    for node in tree.body:
        names = {name for name in defined_by_classes(node) if is_private(name)}
        if isinstance(node, ast.ClassDef) and node.bases and names:
            made = getattr(importlib.import_module(module), node.name)
            bases = [base for base in made.__mro__ if not base.__module__.startswith("headprune")]
            yield from (name for name in names if any(name in vars(base) for base in bases))


def module_of(file: Any) -> str:
    return ".".join(("headprune", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def test_no_other_private_name_is_used() -> None:
    own = {name for tree in TREES.values() for name in defined_by_classes(tree)}
    listed = {private.name for private in PRIVATE} | UNTESTED
    used = {
        str(file.relative_to(ROOT)): {
            *(name for name in private_names(tree) if name not in own),
            *(overridden(tree, module_of(file)) if room_of(file) != "__main__" else ()),
        }
        - listed
        for file, tree in TREES.items()
    }
    assert {file: names for file, names in used.items() if names} == {}, "use a public name, or list it in PRIVATE"


def test_a_private_name_would_be_seen() -> None:
    code = "import torch._dynamo\nfrom torch import _C\nmodel._secret\ngetattr(model, '_hidden')\nself._own = 1"
    assert set(private_names(ast.parse(code))) == {"torch._dynamo", "_C", "_secret", "_hidden", "_own"}
    assert list(defined_by_classes(ast.parse(code))) == ["_own"]
    file = ROOT / "training" / "trainer.py"
    assert "_load_from_checkpoint" in set(overridden(ast.parse(file.read_text()), module_of(file)))
