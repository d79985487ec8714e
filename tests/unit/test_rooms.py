"""Imports point one way: a room knows only the rooms before it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import headprune
from headprune import discovery

ROOT = Path(headprune.__file__).parent
# The way of the data; what stands beside each other may not know each other.
ORDER = (
    {"errors", "defaults", "lazy"},
    {"extras", "distributed", "cache"},
    {"batches"},
    {"hooks"},
    {"models"},
    {"units"},
    {"discovery"},
    {"tasks"},
    {"surgery"},
    {"vocabulary"},
    {"signals"},
    {"layerwise"},
    {"measure"},
    {"criteria"},
    {"repair"},
    {"search"},
    {"store"},
    {"gates"},
    {"data"},
    {"recovery"},
    {"runtimes"},
    {"report"},
    {"runs"},
    {"papers"},
    {"cli"},
    {"__main__"},
)
PLACE = {room: place for place, rooms in enumerate(ORDER) for room in rooms}


def room_of(file: Path) -> str:
    inside = file.relative_to(ROOT)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def imported(tree: ast.AST) -> set[str]:
    """Rooms that a module imports from, wherever in its code."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "headprune" else [module]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("headprune.")}
    return found - {"__version__"}


FILES = sorted(file for file in ROOT.rglob("*.py") if room_of(file) != "__init__")


def against(room: str, others: set[str]) -> set[str]:
    """Rooms that this one may not import from; a config is declared before what it declares is made."""
    allowed = {"discovery"} if room == "units" else set()  # asked, inside a function, where a class is not in the table
    return {other for other in others - allowed if other != room and PLACE[other] >= PLACE[room]}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_point_one_way(file: Path) -> None:
    room = room_of(file)
    assert room in PLACE, f"{room} is a new room: say where it stands"
    assert against(room, imported(ast.parse(file.read_text()))) == set()


def test_a_wrong_import_would_be_seen() -> None:
    assert against("units", imported(ast.parse("def late():\n    from headprune.cli.main import app"))) == {"cli"}
    assert against("tasks", imported(ast.parse("from headprune import defaults, search"))) == {"search"}
    assert against("search", imported(ast.parse("import headprune.units.spec"))) == set()


def reaching_into_discovery(tree: ast.Module) -> set[str]:
    """Imports of more than what the room exports, or where a module is imported and not where a function asks."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("headprune.discovery")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headprune"):
            if node.module == "headprune.discovery" and node not in tree.body:
                found |= {alias.name for alias in node.names} - set(discovery.__all__)
            elif f"{node.module}.".startswith("headprune.discovery."):
                found.add(str(node.module))
            elif node.module == "headprune":
                found |= {alias.name for alias in node.names if alias.name == "discovery"}
    return found


@pytest.mark.parametrize("file", [file for file in FILES if room_of(file) != "discovery"], ids=str)
def test_discovery_has_one_door(file: Path) -> None:
    assert reaching_into_discovery(ast.parse(file.read_text())) == set()


@pytest.mark.parametrize(
    "line",
    [
        "def late():\n    from headprune.discovery.attention import twin_of",
        "def late():\n    from headprune.discovery import twin",
        "def late():\n    from headprune import discovery",
        "import headprune.discovery.twin",
        "from headprune.discovery import discover",
    ],
)
def test_another_way_into_discovery_would_be_seen(line: str) -> None:
    assert reaching_into_discovery(ast.parse(line))


def test_files_fit_in_the_head() -> None:
    longest = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in FILES}
    assert {name: lines for name, lines in longest.items() if lines > 420} == {}


REGISTERING = {
    "register_hook",
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_module_forward_hook",
    "register_module_forward_pre_hook",
    "register_post_accumulate_grad_hook",
}


def registrations(tree: ast.AST) -> list[str]:
    """Calls that put a hook on a module or a tensor, and forwards that are replaced on a module."""
    called = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in REGISTERING]
    targets = [target for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets]
    return called + [
        target.attr for target in targets if isinstance(target, ast.Attribute) and target.attr == "forward"
    ]


def test_hooks_are_registered_in_their_room_alone() -> None:
    elsewhere = {
        str(file.relative_to(ROOT)): names
        for file in FILES
        if room_of(file) != "hooks" and (names := registrations(ast.parse(file.read_text())))
    }
    assert elsewhere == {}
    assert registrations(ast.parse("module.forward = run\ntensor.register_hook(note)")) == ["register_hook", "forward"]
