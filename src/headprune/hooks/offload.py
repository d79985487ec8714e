"""Models whose weights accelerate keeps elsewhere: in the CPU's memory or on disk, brought in while a module runs.

Such a module has empty parameters and a hook that knows where their values are. Here is where inputs of a model go,
what a parameter's value is, and how it gets another one, whether the model is offloaded or not.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch
from torch import nn

from headprune.errors import UnsupportedModelError

HOOK, FORWARD, OWN_FORWARD = "_hf_hook", "forward", "_old_forward"  # where accelerate keeps its things in a module


def input_device(model: nn.Module) -> torch.device:
    """The device that inputs of a model go to."""
    device = next(model.parameters()).device
    if device.type != "meta":
        return device
    executing = (getattr(hook, "execution_device", None) for module in model.modules() for hook in _hooks(module))
    first = next((place for place in executing if place is not None), None)
    return device if first is None else torch.device(first)


def is_offloaded(model: nn.Module) -> bool:
    """Whether values of some parameters are elsewhere."""
    return any(_keeper(module) is not None for module in model.modules())


def refuse_offloaded(model: nn.Module, what: str) -> None:
    """What changes all weights at once needs them all at hand."""
    if is_offloaded(model):
        raise UnsupportedModelError(
            f"Weights of this model are offloaded, so it cannot be {what}; load it without device_map (a smaller one "
            "fits where it did not: prune and save it first)."
        )


def is_dispatched(module: nn.Module) -> bool:
    """Whether accelerate runs this module's forward."""
    return HOOK in module.__dict__ and OWN_FORWARD in module.__dict__


def stored(module: Any, name: str = "weight") -> Any:
    """A parameter with its value, wherever that is kept; None where the module has no such parameter."""
    parameter: Any = getattr(module, name, None)
    keeper = _keeper(module) if parameter is not None and parameter.device.type == "meta" else None
    if keeper is None:
        return parameter
    return keeper.weights_map[name].to(parameter.dtype)


def put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Replace a parameter. One that is kept elsewhere is kept in the CPU's memory from then on.

    Hooks and parameters are replaced and never written into, so that the old ones can be put back.
    """
    keeper = _keeper(module)
    if keeper is None:
        setattr(module, name, parameter)
        return
    kept = {own: keeper.weights_map[own] for own in module._parameters if own != name and own in keeper.weights_map}
    hook = copy.copy(module.__dict__[HOOK])
    other = copy.copy(keeper)
    other.weights_map = {**kept, name: parameter.detach().cpu()}
    other.tied_params_map = None  # by places in memory, which are others now
    if hasattr(hook, "hooks"):
        hook.hooks = tuple(other if own is keeper else own for own in hook.hooks)
    module.__dict__[HOOK] = hook if hasattr(hook, "hooks") else other
    setattr(module, name, nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad))


def bring_in(module: nn.Module) -> None:
    """Give a module its values for good, where it runs, and take accelerate's hook off it."""
    keeper = _keeper(module)
    if keeper is None:
        return
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            value = stored(module, name).to(keeper.execution_device)
            module._parameters[name] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    undress(module)


def undress(module: nn.Module) -> None:
    """Without accelerate's hook, and with its parameters as they are."""
    if is_dispatched(module):
        for name in (HOOK, OWN_FORWARD, FORWARD):
            module.__dict__.pop(name, None)


def rewrap(module: nn.Module) -> None:
    """A module that has another class by now: let accelerate run the forward of that one."""
    if is_dispatched(module):
        module.__dict__[OWN_FORWARD] = MethodType(type(module).forward, module)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of a model with all values, wherever they are kept."""
    state = model.state_dict()
    for path, module in model.named_modules(remove_duplicate=False):
        for name in module._parameters if _keeper(module) is not None else ():
            if (value := stored(module, name)) is not None:
                state[f"{path}.{name}" if path else name] = value
    return state


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    hook = module.__dict__.get(HOOK)
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))


def _keeper(module: nn.Module) -> Any:
    """The hook that knows the values of a module's parameters, if they are elsewhere."""
    return next((hook for hook in _hooks(module) if getattr(hook, "offload", False)), None)
