"""What `headprune reproduce hies` measures: criteria, shares of heads, seeds and numbers of samples."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from headprune.criteria.registry import make
from headprune.papers.all_attention.summary import check_seeds

PAPER = "arXiv 2510.13832"
HIES, RAW = "HIES", "HIES, raw"
# Both come with the alpha that the validation samples choose for the first: as the paper defines it, and without its
# normalisation by length and its mean over tokens.
MIXTURES: dict[str, dict[str, Any]] = {HIES: {}, RAW: {"entropy": "raw", "tokens": "sum"}}
# Name in tables -> criterion.
CRITERIA = {
    "HIS": "his",
    "random": "random",
    "L2": "magnitude",
    "AD": "deficit",
    "AE": "entropy",
    "LLM-Pruner": "taylor",
    "Gnorm": "gnorm",
    "ours": "residual-gradient",
}
NAMES = (*MIXTURES, *CRITERIA)
ALPHAS = tuple(step / 10 for step in range(10))
MANY = 0.3  # the share of heads from which on the paper reports that HIES is better than HIS
FEW = 0.1  # the share up to which it reports that both are as good


@dataclass(frozen=True)
class Settings:
    """The protocol of the paper: scored once on the dense model, and nothing is refitted or trained."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    shares: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    calibration: int = 32
    validation: int = 96
    evaluation: int = 400  # at most
    batch_size: int = 32

    def __post_init__(self) -> None:
        check_seeds(self.seeds)

    @property
    def pool(self) -> int:
        """Samples that calibration and validation are drawn from, by the seed; none of them is evaluated."""
        return 4 * (self.calibration + self.validation)

    def to_json(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self).items()
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields}


def spec_of(name: str, seed: int, alpha: float) -> str:
    """The criterion behind a name in the tables, as it names itself."""
    if name in MIXTURES:
        return str(make("hies", alpha=alpha, **MIXTURES[name]))
    return str(make(CRITERIA[name], **({"seed": seed} if name == "random" else {})))
