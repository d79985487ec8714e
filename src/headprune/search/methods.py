"""Published methods as combinations of what there is: a criterion, how sites share a budget, what makes up for it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from headprune.errors import RegistrationError, ScheduleError


@dataclass(frozen=True)
class Method:
    """One combination, by its name; the fields are settings of a run."""

    name: str
    reference: str
    use: str  # when to take it, for people
    criterion: str
    compensate: str = "none"
    widths: str = "global"
    rounds: int = 1
    units: str = "heads,neurons"

    def settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("criterion", "compensate", "widths", "rounds", "units")}


METHODS: dict[str, Method] = {}


def register_method(made: Method) -> Method:
    """Add a method, which then works everywhere a method is named."""
    if made.name in METHODS:
        raise RegistrationError(f"A method named {made.name!r} exists already; choose another name.")
    METHODS[made.name] = made
    return made


def method_named(name: str) -> Method:
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(METHODS)}."
        raise ScheduleError(f"There is no method {name!r}; {hint}")
    return METHODS[name]
