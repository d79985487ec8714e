"""The tokens of one site, from a forward pass that stops after the site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from headprune.hooks.attach import hooks
from headprune.hooks.residual_stream import streams as streams_of
from headprune.hooks.stop_forward import StopForwardError
from headprune.signals.moments import real_outputs
from headprune.tasks import Task
from headprune.units import Site


@dataclass(frozen=True)
class SiteTokens:
    """Real tokens of one batch at one site."""

    columns: torch.Tensor  # [tokens x in]: the inputs of the output map
    stream: torch.Tensor | None  # [tokens x out]: the residual stream that its output is added to, if requested
    samples: torch.Tensor  # [tokens]: the number of the sample in all the data


class SiteInputs(Protocol):
    """A source of the tokens of sites."""

    def at(self, site: Site, *, streams: bool = False) -> Iterator[SiteTokens]:
        """The tokens of this site, batch after batch, with all applications of each."""


class SiteRecorder:
    """Hooks that record the inputs of a site, and the residual stream that its output is added to, then stop the
    pass."""

    def __init__(self, site: Site, streams: bool) -> None:
        self.site, self.streams = site, streams
        self.columns: list[torch.Tensor] = []
        self.stream: list[torch.Tensor] = []

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        def record_inputs(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            self.columns.append(args[0])
            if not self.streams and len(self.columns) == self.site.applications:
                raise StopForwardError

        def record_stream(site: Site, stream: torch.Tensor) -> None:
            self.stream.append(stream)
            if len(self.stream) == self.site.applications:
                raise StopForwardError

        with hooks([(model.get_submodule(self.site.o), record_inputs)], before=True):
            if self.streams:
                with streams_of(model, [self.site], record_stream):
                    yield
            else:
                yield

    def tokens(self, batch: Mapping[str, Any], task: Task, first: int) -> SiteTokens:
        """The recorded tokens of this batch, whose first sample has this number."""
        parts = [real_outputs(self.site, batch, columns, task) for columns in self.columns]
        stream = [real_outputs(self.site, batch, stream, task)[0] for stream in self.stream]
        if not parts:  # an expert that no token was sent to
            empty = torch.zeros(0, dtype=torch.long)
            return SiteTokens(torch.zeros(0, self.site.size * self.site.width), None, empty)
        return SiteTokens(
            torch.cat([tokens for tokens, _ in parts]),
            torch.cat(stream) if stream else None,
            torch.cat([rows for _, rows in parts]) + first,
        )
