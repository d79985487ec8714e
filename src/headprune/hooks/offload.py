"""Models whose weights accelerate has offloaded to the memory of the CPU or to disk, to load them while a module runs.

Such a module has parameters on the meta device, and a hook of accelerate that has their values. This module finds the
device of inputs, reads values of parameters and replaces them, whether the model is offloaded or not.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch
from torch import nn

from headprune.errors import UnsupportedModelError

HOOK, FORWARD, ORIGINAL_FORWARD = "_hf_hook", "forward", "_old_forward"  # attributes of a module that accelerate sets


def input_device(model: nn.Module) -> torch.device:
    """The device that inputs of a model go to."""
    device = next(model.parameters()).device
    if device.type != "meta":
        return device
    devices = (getattr(hook, "execution_device", None) for module in model.modules() for hook in _hooks(module))
    first = next((device for device in devices if device is not None), None)
    return device if first is None else torch.device(first)


def is_offloaded(model: nn.Module) -> bool:
    """Whether some parameters are offloaded."""
    return any(_offload_hook(module) is not None for module in model.modules())


def refuse_offloaded(model: nn.Module, what: str) -> None:
    """Refuse an operation that needs all weights in memory."""
    if is_offloaded(model):
        raise UnsupportedModelError(
            f"Weights of this model are offloaded, so it cannot be {what}; load it without device_map (if it does "
            "not fit, prune and save it first)."
        )


def is_dispatched(module: nn.Module) -> bool:
    """Whether accelerate runs this module's forward."""
    return HOOK in module.__dict__ and ORIGINAL_FORWARD in module.__dict__


def stored(module: Any, name: str = "weight") -> Any:
    """A parameter with its value, offloaded or not; None where the module has no such parameter."""
    parameter: Any = getattr(module, name, None)
    offload_hook = _offload_hook(module) if parameter is not None and parameter.device.type == "meta" else None
    if offload_hook is None:
        return parameter
    return offload_hook.weights_map[name].to(parameter.dtype)


def put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Replace a parameter. An offloaded one is offloaded to the memory of the CPU from then on.

    Hooks and parameters are replaced and never written into, so that the old ones can be put back.
    """
    offload_hook = _offload_hook(module)
    if offload_hook is None:
        setattr(module, name, parameter)
        return
    others = {
        each: offload_hook.weights_map[each]
        for each in module._parameters
        if each != name and each in offload_hook.weights_map
    }
    hook = copy.copy(module.__dict__[HOOK])
    replacement = copy.copy(offload_hook)
    replacement.weights_map = {**others, name: parameter.detach().cpu()}
    replacement.tied_params_map = None  # by addresses in memory, which have changed
    if hasattr(hook, "hooks"):
        hook.hooks = tuple(replacement if each is offload_hook else each for each in hook.hooks)
    module.__dict__[HOOK] = hook if hasattr(hook, "hooks") else replacement
    setattr(module, name, nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad))


def load_for_good(module: nn.Module) -> None:
    """Load the parameters of a module onto its device for good, and remove accelerate's hook."""
    offload_hook = _offload_hook(module)
    if offload_hook is None:
        return
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            value = stored(module, name).to(offload_hook.execution_device)
            module._parameters[name] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    remove_accelerate_hook(module)


def remove_accelerate_hook(module: nn.Module) -> None:
    """Remove accelerate's hook, and leave the parameters as they are."""
    if is_dispatched(module):
        for name in (HOOK, ORIGINAL_FORWARD, FORWARD):
            module.__dict__.pop(name, None)


def rewrap_forward(module: nn.Module) -> None:
    """Let accelerate run the forward of the class that the module has now."""
    if is_dispatched(module):
        module.__dict__[ORIGINAL_FORWARD] = MethodType(type(module).forward, module)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of a model with all values, offloaded or not."""
    state = model.state_dict()
    for path, module in model.named_modules(remove_duplicate=False):
        for name in module._parameters if _offload_hook(module) is not None else ():
            if (value := stored(module, name)) is not None:
                state[f"{path}.{name}" if path else name] = value
    return state


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    hook = module.__dict__.get(HOOK)
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))


def _offload_hook(module: nn.Module) -> Any:
    """The hook with the values of a module's parameters, if they are offloaded."""
    return next((hook for hook in _hooks(module) if getattr(hook, "offload", False)), None)
