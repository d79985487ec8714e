"""What a field of a group says about itself, and how a verb or a config takes options out of groups."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from headprune.errors import HeadpruneError, ScheduleError


class OptionGroup:
    """Options that belong together; the help shows them under the heading `panel`."""

    panel: ClassVar[str]


Groups = type | Iterable["Option"]


def option(
    default: Any,
    help: str,
    *,
    type: type | None = None,
    minimum: int | None = None,
    parse: Callable[[str], Any] | None = None,
    flag: str | None = None,
    required: bool = False,
    if_absent: str = "",
    panel: str | None = None,
) -> Any:
    """A dataclass field that is an option of the command line too.

    `type` is its type there, if it is not that of the default; `parse` makes its value from text; `flag` is its name
    on the command line, if it is not that of the field; there it may be `required`.
    `if_absent` ends the help with what the default None stands for, where a verb has no other default. `panel` is its
    heading, where that is not the one of the group.
    """
    kind = type or (str if default is None else default.__class__)
    metadata = {"help": help, "type": kind, "minimum": minimum, "parse": parse, "flag": flag, "required": required}
    metadata |= {"if_absent": if_absent, **({} if panel is None else {"panel": panel})}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Option:
    """One option of the command line, with the field that it sets."""

    field: str
    default: Any
    help: str
    type: Any
    panel: str
    minimum: int | None = None
    parse: Callable[[str], Any] | None = None
    flag: str = ""
    required: bool = False
    if_absent: str = ""

    def help_for(self, default: Any) -> str:
        """The help of a verb that has this default."""
        return f"{self.help} {self.if_absent}".strip() if default == self.default else self.help

    @property
    def name(self) -> str:
        """As a Python name; two groups may have fields of the same name under different flags."""
        return self.flag.removeprefix("--").replace("-", "_")


def options_of(group: Groups) -> list[Option]:
    """The options of a group in the order of declaration; of a config, those of all its groups."""
    if not isinstance(group, type):
        return list(group)
    return [_option(group, field) for field in dataclasses.fields(group) if "help" in field.metadata]


def _option(group: type, field: dataclasses.Field[Any]) -> Option:
    about = {"panel": _panel(group, field.name), **field.metadata}
    about["flag"] = about["flag"] or f"--{field.name.replace('_', '-')}"
    return Option(field.name, field.default, **about)


def _panel(group: type, name: str) -> str:
    """The heading of the group that declares a field, which a config inherits from."""
    bases = (base for base in group.__mro__ if "panel" in vars(base) and name in vars(base)["__dataclass_fields__"])
    return next((vars(base)["panel"] for base in bases), "")


def field_of(group: type, name: str) -> Any:
    """A field of a group once more, for a config that takes this option and not the others."""
    (field,) = (field for field in dataclasses.fields(group) if field.name == name)
    return dataclasses.field(default=field.default, metadata={"panel": _panel(group, name), **field.metadata})


def only(group: Groups, *names: str, **changes: Any) -> list[Option]:
    """These options of a group alone, with another help or default where a verb uses them for something else."""
    options = {option.field: option for option in options_of(group)}
    return [replace(options[name], **changes) for name in names]


def from_run(group: Groups) -> list[Option]:
    """The options of a verb that begins with a run: where one is not given, it is as in the run."""
    return [replace(each, default=None, required=False, if_absent=_run_default(each)) for each in options_of(group)]


def _run_default(option: Option) -> str:
    return "By default that of the run" + ("." if option.default is None else f", or {option.default}.")


def values_of(group: Groups, values: Mapping[str, Any]) -> dict[str, Any]:
    """Field -> value, of the values that a verb has for the options of a group; text is parsed."""
    result = {}
    for option in options_of(group):
        if option.name in values:
            value = values[option.name]
            result[option.field] = option.parse(value) if option.parse and isinstance(value, str) else value
    return result


def check_numbers(config: Any, error: type[HeadpruneError] = ScheduleError) -> None:
    """Refuse options of a config that are not the numbers, or True or False, that they should be; numbers of numpy
    become those of Python. None is a value where it is the default."""
    for option in options_of(type(config)):
        value = getattr(config, option.field)
        if value is None and option.default is None:
            continue
        if option.type is bool and not isinstance(value, bool):
            raise error(f"{option.field} must be True or False, not {value!r:.60}.")
        if option.type in (int, float):
            checked = check_number(option.field, value, whole=option.type is int, least=option.minimum, error=error)
            object.__setattr__(config, option.field, checked)


def check_number(
    name: str,
    value: Any,
    *,
    whole: bool = False,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    error: type[HeadpruneError] = ScheduleError,
) -> int | float:
    """The number; refuses a value outside its range with a sentence that says what it may be."""
    fits = (
        _is_number(value, whole=whole)
        and (least is None or value >= least)
        and (above is None or value > above)
        and (below is None or value < below)
    )
    if not fits:
        limits = (
            *([] if least is None else [f"at least {least:g}"]),
            *([] if above is None else [f"above {above:g}"]),
            *([] if below is None else [f"below {below:g}"]),
        )
        kind = "a whole number" if whole else "a number" if limits else "a finite number"
        raise error(f"{' '.join([name, 'must be', kind, ' and '.join(limits)]).rstrip()}, not {value!r:.60}.")
    return value if isinstance(value, (int, float)) else int(value) if whole else float(value)


def _is_number(value: Any, *, whole: bool) -> bool:
    number = isinstance(value, numbers.Integral if whole else numbers.Real) and not isinstance(value, bool)
    return number and math.isfinite(value)


def parse_points(text: str) -> tuple[float, ...]:
    """One number, or several with commas between them; what they may be depends on the option."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ScheduleError(f"Give a number such as 0.5, or several with commas between them, not {text!r}.") from None


def parse_keep(text: str) -> float | int:
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        raise ScheduleError(
            f"--keep takes a share such as 0.5 or a number of heads such as 36, not {text!r}."
        ) from None
