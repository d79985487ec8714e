"""Restores a model after a failed removal: parameters are replaced and never written into, so the old ones still
exist."""

from __future__ import annotations

from typing import Any

from torch import nn

from headprune.units.slicing.record import NAMES

PARTS = ("_parameters", "_buffers", "_modules")  # dictionaries of a module that surgery writes into
RECORDS = (*NAMES.values(), "headprune")  # entries of the config that surgery writes


class Undo:
    """The state of every module that surgery may change, to be restored if something fails."""

    def __init__(self, model: nn.Module) -> None:
        self.config: Any = getattr(model, "config", None)
        attributes = getattr(self.config, "__dict__", {})
        self.records = {name: attributes[name] for name in RECORDS if name in attributes}
        self.states = []
        for module in model.modules():
            state = dict(module.__dict__)
            inner = {key: dict(state[key]) for key in PARTS}
            self.states.append((module, type(module), {**state, **inner}))

    def __call__(self) -> None:
        for module, kind, state in self.states:
            module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update({**state, **{key: dict(state[key]) for key in PARTS}})
        for name in RECORDS:
            if name in self.records:
                setattr(self.config, name, self.records[name])
            elif hasattr(self.config, name):
                delattr(self.config, name)
