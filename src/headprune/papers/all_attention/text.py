"""The text of a small language model: bytes as tokens, split into a training and a validation part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headprune.checkpoint.atomic_files import path_exists, short
from headprune.papers.paper_models import ReproductionError

VOCABULARY = 256  # tokens are bytes of UTF-8, so no tokenizer is needed
HELD_OUT = 0.1  # share at the end of the text for validation
MIN_WINDOWS = 16  # windows that the validation part must have
DEFAULT = "pydoc_data.topics, the help texts of Python's standard library"


@dataclass(frozen=True)
class Text:
    """A text as tokens, with its name and digest."""

    name: str
    digest: str
    training: torch.Tensor
    validation: torch.Tensor

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "sha256": self.digest,
            "training_bytes": len(self.training),
            "validation_bytes": len(self.validation),
        }

    def batches(self, steps: int, size: int, context: int, seed: int) -> Iterator[torch.Tensor]:
        """Random windows of the training part, [size x context] for each step."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            starts = torch.randint(len(self.training) - context + 1, (size,), generator=generator)
            yield self.training[starts[:, None] + torch.arange(context)].long()

    def windows(self, most: int, context: int) -> torch.Tensor:
        """Consecutive windows of the validation part, [windows x context]; at most `most`, evenly spaced."""
        count = len(self.validation) // context
        windows = self.validation[: count * context].view(count, context)
        return windows[torch.linspace(0, count - 1, min(most, count)).round().long()].long()


def read_text(data: str | Path | None, context: int) -> Text:
    """The text of a file; by default, the help texts of Python."""
    if data is None:
        name, content = DEFAULT, _topics().encode()
    else:
        name, content = Path(data).name, _content(Path(data))
    least = round(MIN_WINDOWS * context / HELD_OUT)
    if len(content) < least:
        raise ReproductionError(
            f"{short(data or name)} has {len(content):,} bytes, but training and validation need {least:,}; give a "
            "longer text."
        )
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    end = len(tokens) - int(HELD_OUT * len(tokens))
    return Text(name, hashlib.sha256(content).hexdigest(), tokens[:end], tokens[end:])


def _content(path: Path) -> bytes:
    if not path_exists(path, ReproductionError):
        raise ReproductionError(f"There is no file {short(path)}; check the path.")
    try:
        content = path.read_bytes()
        content.decode()
    except OSError as error:
        raise ReproductionError(f"{short(path)} cannot be read ({error.strerror}); give a text file.") from None
    except UnicodeDecodeError:
        raise ReproductionError(f"{short(path)} is not a text in UTF-8; give a text file.") from None
    return content


def _topics() -> str:
    """All help topics in order of their names. They differ between versions of Python, so results record the digest of
    the text."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ReproductionError(
            "This Python comes without its help texts (pydoc_data); give a text file with --data."
        ) from None
    return "\n\n".join(topics[name] for name in sorted(topics))
