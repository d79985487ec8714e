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
        content = _load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"There is no {kind} {path}; check the path.") from None
    except OSError as problem:
        raise error(f"Cannot read the {kind} {path}: {problem.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        raise error(f"{path} is not valid YAML: {' '.join(str(problem).split())}.") from None
    if not isinstance(content, dict):
        raise error(f"{path} must hold names and values in YAML, such as {example}.")
    return underscored(path, content, error)


def underscored(path: Path | str, values: Mapping[Any, Any], error: type[HeadpruneError]) -> dict[str, Any]:
    """The same values by names with underscores for dashes."""
    named: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(name, str):
            raise error(f"Names of options are texts, but {path} has {name!r}.")
        if name.replace("-", "_") in named:
            raise error(f"{path} has {name!r} twice; keep one of them.")
        named[name.replace("-", "_")] = value
    return named


def _load(text: str) -> Any:
    """The content of a YAML file; of a name that is given twice YAML would take the last value."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            names = [key.value for key, _ in pairs if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
            twice = [name for name in names if names.count(name) > 1]
            if twice:
                raise yaml.constructor.ConstructorError(None, None, f"{twice[0]!r} is there twice", node.start_mark)
            return super().construct_mapping(node, deep)

    return yaml.load(text, Loader)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that refuses a name: the nearest one, or all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names)}."
