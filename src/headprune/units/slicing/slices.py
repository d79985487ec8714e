"""Index selections of weights, collected first and then applied together, so that tied weights stay tied."""

from __future__ import annotations

import torch
from torch import nn

from headprune.errors import UnsupportedModelError
from headprune.hooks.offload import put, stored


class Slices:
    """The indices to keep of each parameter along each axis."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.selections: dict[int, tuple[nn.Parameter, dict[int, list[int]]]] = {}
        self.users: dict[int, list[tuple[nn.Module, str]]] = {}  # parameter -> modules with it, and its name there
        self.sliced_in: dict[int, set[int]] = {}  # parameter -> the modules whose heads are removed
        self.buffers: list[tuple[nn.Module, str, int, list[int]]] = []
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.users.setdefault(id(parameter), []).append((module, name))

    def add(self, tensor: str, dim: int, selected: list[int]) -> None:
        """The indices to keep on one axis of a parameter or buffer, by its path; several axes of one tensor may be
        sliced."""
        path, _, name = tensor.rpartition(".")
        module = self.model.get_submodule(path)
        parameter = getattr(module, name)
        if isinstance(parameter, nn.Parameter):
            self._add_parameter(module, parameter, dim, selected, path)
        else:
            self.buffers.append((module, name, dim, selected))

    def _add_parameter(
        self, module: nn.Module, parameter: nn.Parameter, dim: int, selected: list[int], path: str
    ) -> None:
        self.sliced_in.setdefault(id(parameter), set()).add(id(module))
        _, axes = self.selections.setdefault(id(parameter), (parameter, {}))
        if axes.setdefault(dim, selected) != selected:
            raise UnsupportedModelError(
                f"The weight of {path} is tied to another projection that would keep other heads; untie them first."
            )

    def apply(self) -> None:
        for key, (parameter, _) in self.selections.items():
            if {id(module) for module, _ in self.users[key]} - self.sliced_in[key]:
                raise UnsupportedModelError(
                    f"A weight of shape {list(parameter.shape)} is tied to another module that keeps all its heads; "
                    "untie them, or remove the same heads there."
                )
        for parameter, axes in self.selections.values():
            kept = stored(*self.users[id(parameter)][0]).detach()
            for dim, selected in axes.items():
                kept = kept.index_select(dim, torch.tensor(selected, dtype=torch.long, device=kept.device))
            smaller = nn.Parameter(kept.contiguous(), requires_grad=parameter.requires_grad)
            for module, name in self.users[id(parameter)]:
                put(module, name, smaller)
        for module, name, dim, selected in self.buffers:
            buffer = getattr(module, name)
            setattr(
                module,
                name,
                buffer.index_select(dim, torch.tensor(selected, dtype=torch.long, device=buffer.device)).contiguous(),
            )
