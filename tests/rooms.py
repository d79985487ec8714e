"""The rooms (packages) of src/headprune: which may import which, and the table of them in CONTRIBUTING.md, which
`python tests/rooms.py --write` writes anew."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
ROOT = PROJECT / "src" / "headprune"
CONTRIBUTING = PROJECT / "CONTRIBUTING.md"
BEGIN, END = "<!-- rooms: written by tests/rooms.py -->", "<!-- end of rooms -->"

# Modules that every room may import; each of them imports only those before it.
COMMON = (
    *(
        "errors",
        "former_names",
        "json_forms",
        "defaults",
        "lazy",
        "extras",
        "distributed",
        "cache",
        "display",
        "progress",
    ),
    "batches",
)
# A room, and the rooms that it may import. A room names only rooms above its own line.
MAY_IMPORT = {
    "config": "",
    "hooks": "",
    "models": "",
    "units": "hooks",
    "discovery": "hooks units",
    "tasks": "units",
    "surgery": "hooks units",
    "vocabulary": "hooks units",
    "signals": "hooks units tasks",
    "layerwise": "hooks units tasks surgery signals",
    "measure": "hooks units tasks surgery signals",
    "criteria": "hooks units tasks signals measure",
    "repair": "hooks units tasks surgery signals layerwise measure",
    "search": "config hooks units tasks surgery signals layerwise measure criteria repair",
    "checkpoint": "hooks models units surgery vocabulary",
    "run_folder": "config measure search checkpoint",
    "data": "tasks checkpoint",
    "training": "config hooks units tasks surgery measure criteria search checkpoint data",
    "snippets": "units tasks checkpoint",
    "exports": "hooks units tasks measure checkpoint data snippets",
    "reports": "config units measure criteria search checkpoint run_folder data training snippets exports",
    "runs": "config hooks units tasks surgery vocabulary layerwise measure criteria repair search checkpoint run_folder"
    " data training snippets exports reports",
    "papers": "models units tasks surgery signals measure criteria search checkpoint run_folder data training reports"
    " runs",
    "cli": "config units measure criteria search checkpoint run_folder data training snippets exports reports runs"
    " papers",
    "__main__": "cli",
}
# Imports against that direction, inside a function, and why.
EXCEPTIONS = {
    ("units", "discovery"): "the sites of a class that is not in the table of families are discovered",
    ("layerwise", "discovery"): "the check of the walker runs on a small random model of the same class",
    ("criteria", "reports"): "`ScoreResult.plot` draws the heat map of a report",
    ("search", "reports"): "`PruneResult.plot` draws the curve of a report",
    ("training", "reports"): "`FinetuneResult.plot` draws the losses of a report",
    ("checkpoint", "discovery"): "a plain checkpoint is compared on inputs that discovery makes up for any class",
}


def room_of(file: Path) -> str:
    inside = file.relative_to(ROOT)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


FILES = sorted(file for file in ROOT.rglob("*.py") if room_of(file) != "__init__")


def imported_rooms(tree: ast.AST) -> set[str]:
    """Rooms that a module imports from, wherever in its code."""
    rooms: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "headprune" else [module]
        else:
            continue
        rooms |= {name.split(".")[1] for name in names if name.startswith("headprune.")}
    return rooms - {"__version__"}


def allowed(room: str) -> set[str]:
    """Rooms that this one may import from."""
    if room in COMMON:
        return set(COMMON[: COMMON.index(room)])
    asked = {other for asking, other in EXCEPTIONS if asking == room}
    return set(COMMON) | set(MAY_IMPORT[room].split()) | asked


def forbidden(room: str, others: Iterable[str]) -> set[str]:
    """Those of the imported rooms that this one may not import from."""
    return set(others) - {room} - allowed(room)


def sentence(room: str) -> str:
    """What a room is: the first paragraph of its docstring."""
    file = ROOT / room / "__init__.py"
    text = ast.get_docstring(ast.parse((file if file.exists() else ROOT / f"{room}.py").read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def markdown_table() -> str:
    """The rooms, the lowest first, as the table of CONTRIBUTING.md."""
    lines = ["| room | what it is | imports from |", "|---|---|---|"]
    lines += [f"| `{name}.py` | {sentence(name)} | |" for name in COMMON]
    for room, others in MAY_IMPORT.items():
        if room != "__main__":
            exceptions = [f"(`{other}`)" for asking, other in EXCEPTIONS if asking == room]
            names = " ".join([*(f"`{other}`" for other in others.split()), *exceptions])
            lines.append(f"| `{room}/` | {sentence(room)} | {names} |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """The text of CONTRIBUTING.md, with the table between its two marks as it should be."""
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n\n{markdown_table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        CONTRIBUTING.write_text(with_table(CONTRIBUTING.read_text()))
    else:
        print(markdown_table())
