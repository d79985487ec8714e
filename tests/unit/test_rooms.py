"""Rooms import only the rooms that the table in tests/rooms.py allows, and CONTRIBUTING.md shows that table."""

from __future__ import annotations

import ast

import pytest

from headprune import discovery
from rooms import (
    COMMON,
    CONTRIBUTING,
    EXCEPTIONS,
    FILES,
    MAY_IMPORT,
    ROOT,
    allowed,
    forbidden,
    imported_rooms,
    room_of,
    sentence,
    with_table,
)

TREES = {file: ast.parse(file.read_text()) for file in FILES}


def test_rooms_import_only_what_the_table_allows() -> None:
    rooms = {room_of(file) for file in FILES}
    assert rooms - set(COMMON) == MAY_IMPORT.keys(), "a room has a line in tests/rooms.py, and a line has a room"
    wrong = {file: forbidden(room_of(file), imported_rooms(tree)) for file, tree in TREES.items()}
    assert {str(file.relative_to(ROOT)): rooms for file, rooms in wrong.items() if rooms} == {}


def test_the_table_allows_no_more_than_there_is() -> None:
    real: dict[str, set[str]] = {room: set() for room in MAY_IMPORT}
    for file, tree in TREES.items():
        real.setdefault(room_of(file), set()).update(imported_rooms(tree))
    unused = {room: allowed(room) - real[room] - set(COMMON) for room in MAY_IMPORT}
    assert {room: others for room, others in unused.items() if others} == {}


def test_the_table_points_one_way() -> None:
    order = list(MAY_IMPORT)
    for room, others in MAY_IMPORT.items():
        assert set(others.split()) <= set(order[: order.index(room)]), room


def test_exceptions_are_imported_inside_functions() -> None:
    for file, tree in TREES.items():
        first = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        rooms = imported_rooms(ast.Module(first, type_ignores=[]))
        assert {room for room in rooms if (room_of(file), room) in EXCEPTIONS} == set(), file


def test_a_wrong_import_would_be_seen() -> None:
    assert forbidden("units", imported_rooms(ast.parse("def f():\n    from headprune.cli.main import app"))) == {"cli"}
    assert forbidden("tasks", imported_rooms(ast.parse("from headprune import defaults, search"))) == {"search"}
    assert forbidden("search", imported_rooms(ast.parse("import headprune.units.spec"))) == set()
    assert forbidden("extras", {"errors", "batches"}) == {"batches"}


def test_contributing_has_the_table() -> None:
    text = CONTRIBUTING.read_text()
    assert with_table(text) == text, "run: python tests/rooms.py --write"


def test_every_room_says_in_one_sentence_what_it_is() -> None:
    texts = {room: sentence(room) for room in [*COMMON, *MAY_IMPORT]}
    bad = {room: text for room, text in texts.items() if not text.endswith(".") or ". " in text or "|" in text}
    assert bad == {}


def reaching_into_discovery(tree: ast.Module) -> set[str]:
    """Imports of more than what the room exports, or where a module is imported and not where a function asks."""
    actual = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            actual |= {alias.name for alias in node.names if alias.name.startswith("headprune.discovery")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headprune"):
            if node.module == "headprune.discovery" and node not in tree.body:
                actual |= {alias.name for alias in node.names} - set(discovery.__all__)
            elif f"{node.module}.".startswith("headprune.discovery."):
                actual.add(str(node.module))
            elif node.module == "headprune":
                actual |= {alias.name for alias in node.names if alias.name == "discovery"}
    return actual


def test_discovery_has_one_door() -> None:
    reaching = {file: reaching_into_discovery(tree) for file, tree in TREES.items() if room_of(file) != "discovery"}
    assert {str(file.relative_to(ROOT)): names for file, names in reaching.items() if names} == {}


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


CHANGES_FILES = {
    *("write_text", "write_bytes", "unlink", "rename", "mkdir", "rmdir", "rmtree", "touch", "symlink_to", "copytree"),
    *("copy2", "copyfile", "move", "truncate"),
}
# Files of the room of reports that write what the user names: --out and --figures of report, --out of score.
WRITES_WHAT_IS_NAMED = {"page.py", "save_figures.py", "scores.py"}


def changes_of_files(tree: ast.AST) -> list[str]:
    """Calls that write, move or delete files."""
    names = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        words = [
            part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
        ]
        mode = name == "open" and any(set(word) <= set("rwxabt+") and set(word) & set("wxa+") for word in words)
        names += [name] if name in CHANGES_FILES or mode else []
    return names


def test_reports_only_read() -> None:
    writing = {file.name for file, tree in TREES.items() if room_of(file) == "reports" and changes_of_files(tree)}
    assert writing == WRITES_WHAT_IS_NAMED
    for line in ("write_text(file, 'a')", "(folder / 'a').unlink()", "open(name, 'w')", "path.open(mode='r+b')"):
        assert changes_of_files(ast.parse(line)), line
    assert changes_of_files(ast.parse("open(name)\npath.open('rb')\n'a'.replace('b', 'c')")) == []


def test_code_that_loads_a_checkpoint_is_in_the_room_of_snippets() -> None:
    """So that what pages, cards and the program show is one line everywhere."""
    files = [file for room in ("reports", "cli") for file in (ROOT / room).rglob("*") if file.suffix in (".py", ".j2")]
    assert [file.name for file in files if "headprune.load(" in file.read_text()] == []
    assert len(files) > 30


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
        for file, tree in TREES.items()
        if room_of(file) != "hooks" and (names := registrations(tree))
    }
    assert elsewhere == {}
    assert registrations(ast.parse("module.forward = run\ntensor.register_hook(note)")) == ["register_hook", "forward"]
