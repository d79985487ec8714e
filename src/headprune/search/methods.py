"""Published methods as combinations of a criterion, an allocation of the budget over sites, and a repair."""

from __future__ import annotations

import difflib
from dataclasses import InitVar, dataclass
from typing import Any

from headprune.errors import RegistrationError, ScheduleError
from headprune.search.config import current_names


@dataclass(frozen=True)
class Method:
    """A named combination; its fields are settings of a run."""

    name: str
    reference: str
    use: str  # when to use it, in listings
    criterion: str
    repair: str = "none"
    widths: str = "global"
    rounds: int = 1
    units: str = "heads,neurons"
    compensate: InitVar[Any] = None  # the former name of `repair`

    def __post_init__(self, compensate: Any) -> None:
        if compensate is not None:
            object.__setattr__(self, "repair", current_names({"compensate": compensate, "method": self.name})["repair"])

    def settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("criterion", "repair", "widths", "rounds", "units")}


METHODS: dict[str, Method] = {}


def register_method(method: Method) -> Method:
    """Register a method under its name."""
    if method.name in METHODS:
        raise RegistrationError(f"A method named {method.name!r} exists already; choose another name.")
    METHODS[method.name] = method
    return method


def method_named(name: str) -> Method:
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(METHODS)}."
        raise ScheduleError(f"There is no method {name!r}; {hint}")
    return METHODS[name]


for _method in (
    Method(
        "headprune",
        "this project: docs/budgets.md",
        "the default: errors weighted by the logits' sensitivity, rounds, repairs towards the dense model",
        "elimination",
        repair="dense",
        rounds=6,
    ),
    Method(
        "kwon",
        "Kwon et al. 2022, arXiv 2204.09656",
        "encoders with labelled data; minutes on a GPU",
        "fisher(rearrange=True)",
        repair="scale",
    ),
    Method(
        "flap",
        "FLAP, An et al. 2023, arXiv 2312.11983",
        "language models, without gradients",
        "fluctuation(standardize=True)",
        repair="mean",
        widths="threshold",
    ),
    Method(
        "wanda-sp",
        "Wanda, arXiv 2306.11695, structured as in FLAP, arXiv 2312.11983",
        "a baseline for language models, without gradients and repair",
        "wanda",
        widths="uniform",
    ),
    Method(
        "ziplm",
        "ZipLM, Kurtic et al. 2023, arXiv 2302.04089",
        "second-order pruning site by site, widths by error",
        "elimination(metric=output,ridge=0.01)",
        repair="lstsq",
    ),
    Method(
        "osscar",
        "OSSCAR, Meng et al. 2024, arXiv 2403.12983",
        "second-order pruning site by site, the same share everywhere",
        "elimination(metric=output,ridge=0.01)",
        repair="lstsq",
        widths="uniform",
    ),
    Method(
        "llm-pruner",
        "LLM-Pruner, Ma et al. 2023, arXiv 2305.11627",
        "language models that are fine-tuned afterwards",
        "taylor",
        widths="uniform",
    ),
    Method("magnitude", "the size of weights", "a baseline without data", "magnitude", widths="uniform"),
    Method("random", "chance", "the baseline to beat; run several seeds", "random", widths="uniform"),
):
    register_method(_method)
