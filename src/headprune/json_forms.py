"""Forms of JSON values: what a file must hold is stated once, and checked where the file is read.

A form is

    int, float, str, bool, dict     a value of this type; float takes whole numbers too, and nothing but bool takes true
    None                            null
    (form, form)                    one of these
    [form]                          a list of such values
    [form, form]                    a list of exactly these
    {str: form}                     an object with such values under any names
    {"name": form, "other?": form}  an object with these names, those with a mark only perhaps; it may have others
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Form = Any
NUMBER = (float, None)  # JSON has no NaN, which is null
COUNT_BY_NAME = {str: int}
INTERVAL = (None, [NUMBER, NUMBER])

NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "an object"}


class FormError(ValueError):
    """A value has another form; the message says where and which."""


def check_form(value: Any, form: Form, where: str = "") -> None:
    """Raise `FormError` unless the value has this form."""
    if isinstance(form, tuple):
        if not any(_fits(value, alternative) for alternative in form):
            structured = [part for part in form if isinstance(part, (list, dict)) and isinstance(value, type(part))]
            if len(structured) == 1:  # says what is wrong inside
                check_form(value, structured[0], where)
            raise _error(value, " or ".join(_name(alternative) for alternative in form), where)
    elif isinstance(form, list):
        _check_list(value, form, where)
    elif isinstance(form, dict):
        _check_object(value, form, where)
    elif not _is_type(value, form):
        raise _error(value, _name(form), where)


def _check_list(value: Any, form: list[Form], where: str) -> None:
    if not isinstance(value, list) or (len(form) > 1 and len(value) != len(form)):
        raise _error(value, _name(form), where)
    for number, part in enumerate(value):
        check_form(part, form[number if len(form) > 1 else 0], f"{where}[{number}]")


def _check_object(value: Any, form: dict[Any, Form], where: str) -> None:
    if not isinstance(value, dict):
        raise _error(value, "an object", where)
    prefix = f"{where}." if where else ""
    for name, part in form.items():
        if name is str:
            for key, entry in value.items():
                check_form(entry, part, f"{prefix}{key}")
        elif name.removesuffix("?") in value:
            check_form(value[name.removesuffix("?")], part, f"{prefix}{name.removesuffix('?')}")
        elif not name.endswith("?"):
            raise FormError(f"{prefix}{name} is missing")


def _fits(value: Any, form: Form) -> bool:
    try:
        check_form(value, form)
    except FormError:
        return False
    return True


def _is_type(value: Any, form: Form) -> bool:
    if form is None or value is None:
        return value is form
    if isinstance(value, bool):
        return form is bool
    if form is float:
        return isinstance(value, (int, float))
    return isinstance(value, form)


def _name(form: Form) -> str:
    if form is None:
        return "null"
    if isinstance(form, tuple):
        return " or ".join(map(_name, form))
    if isinstance(form, list):
        return "a list" if len(form) == 1 else f"a list of {len(form)}"
    return "an object" if isinstance(form, dict) else NAMES[form]


def _error(value: Any, expected: str, where: str) -> FormError:
    text = repr(value)
    return FormError(f"{where or 'it'} is {text if len(text) <= 40 else f'{text[:40]}...'}, not {expected}")


def differing(
    recorded: Mapping[str, Any], settings: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> list[str]:
    """The names of settings that differ from those in a file, where a missing one has its default."""
    names, defaults = dict.fromkeys([*recorded, *settings]), defaults or {}
    return [name for name in names if recorded.get(name, defaults.get(name)) != settings.get(name)]


def other_settings(
    folder: Path, noun: str, names: Sequence[str], recorded: Mapping[str, Any], settings: Mapping[str, Any], fix: str
) -> str:
    """The sentence that refuses a folder because of settings of these names."""
    name, *others = names
    also = f" (and {', '.join(others)})" if others else ""
    return (
        f"{folder} belongs to a {noun} with other settings: {name} was {recorded.get(name)!r} and is now "
        f"{settings.get(name)!r}{also}; use the same settings, {fix}."
    )
