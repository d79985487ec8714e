"""Options in a file: YAML, or JSON, which YAML can read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headprune.errors import HeadpruneError


def read_options(path: Path, error: type[HeadpruneError], *, kind: str, example: str) -> dict[str, Any]:
    """Name -> value, with underscores for dashes; a file that cannot be read is refused with this `error`."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"There is no {kind} {path}; check the path.") from None
    except OSError as problem:
        raise error(f"Cannot read the {kind} {path}: {problem.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        raise error(f"{path} is not valid YAML: {' '.join(str(problem).split())}.") from None
    if not isinstance(content, dict):
        raise error(f"{path} must hold names and values, such as {example}.")
    return underscored(path, content, error)


def underscored(path: Path | str, values: Mapping[Any, Any], error: type[HeadpruneError]) -> dict[str, Any]:
    """The same values by names with underscores for dashes."""
    for name in values:
        if not isinstance(name, str):
            raise error(f"Names of options are texts, but {path} has {name!r}.")
    return {name.replace("-", "_"): value for name, value in values.items()}


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that refuses a name: the nearest one, or all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names)}."
