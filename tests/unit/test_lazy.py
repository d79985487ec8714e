"""What is imported when: a person who asks for help does not wait for torch."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import subprocess
import sys

import pytest

import headprune
from run_helpers import environment, in_fork, material

# Runs the program with the arguments of each case, in forks of a process that has imported what every command prints
# with, then says how each ended and what it had imported.
PROGRAM = """
import json, os, sys, tempfile
import rich.console, rich.table, typer.main, typer.rich_utils
heavy = ("torch", "transformers", "numpy", "pandas", "datasets", "sklearn", "altair", "vl_convert", "jinja2")

def start(arguments):
    from headprune.__main__ import main
    sys.argv = ["headprune", *arguments]
    try:
        main()
        code = 0
    except SystemExit as exit:
        code = exit.code or 0
    return {"code": code, "imported": [name for name in heavy if name in sys.modules]}

report = {}
for case, arguments in json.loads(sys.argv[1]).items():
    with tempfile.TemporaryFile("w+") as answer:
        if not os.fork():
            try:
                json.dump(start(arguments), answer)
                answer.flush()
            finally:
                os._exit(0)
        os.wait()
        answer.seek(0)
        report[case] = json.loads(answer.read() or "null")
print(json.dumps(report))
"""


def run(program: str, *arguments: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


MODEL, DATA = "{bert}", "{data_csv}"
WITHOUT_TORCH: dict[str, tuple[int, list[str]]] = {
    "help": (0, ["--help"]),
    "version": (0, ["--version"]),
    "no-arguments": (2, []),
    "help-of-a-verb": (0, ["prune", "--help"]),
    "unknown-verb": (2, ["frobnicate"]),
    "unknown-option": (2, ["score", MODEL, "--data", DATA, "--nope"]),
    "unknown-criterion": (2, ["score", MODEL, "--data", DATA, "--criterion", "gnrom"]),
    "bad-option-of-a-criterion": (2, ["prune", MODEL, "--data", DATA, "--criterion", "hies(alpha=1)", "--out", "run"]),
    "unknown-criterion-among-others": (2, ["compare", MODEL, "--data", DATA, "--criteria", "his,x+mean", "--out", "r"]),
    "bad-keep": (2, ["prune", MODEL, "--data", DATA, "--keep", "half", "--out", "run"]),
    "missing-model": (2, ["inspect", "./nowhere"]),
    "missing-model-to-prune": (2, ["prune", "./nowhere", "--data", DATA, "--out", "run"]),
    "missing-data": (2, ["prune", MODEL, "--data", "nowhere.csv", "--out", "run"]),
    "missing-calibration": (2, ["prune", MODEL, "--data", DATA, "--calibration", "no.csv", "--out", "run"]),
    "unknown-paper": (2, ["reproduce", "another", "--out", "out"]),
}


def test_the_program_imports_nothing_heavy_to_help_or_to_refuse() -> None:
    m = material()
    places = {"bert": m.bert, "data_csv": m.data_csv}
    cases = {
        case: [argument.format(**places) for argument in arguments] for case, (_, arguments) in WITHOUT_TORCH.items()
    }
    expected = {case: {"code": code, "imported": []} for case, (code, _) in WITHOUT_TORCH.items()}
    assert run(PROGRAM, json.dumps(cases)) == expected


def test_importing_the_package_imports_nothing_heavy() -> None:
    actual = run(
        "import sys, json, headprune; headprune.__all__, headprune.__version__, dir(headprune), headprune.Criterion; "
        "print(json.dumps({n: n in sys.modules for n in ('torch', 'transformers', 'numpy', 'rich', 'typer')}))"
    )
    assert not any(actual.values())


def test_every_public_name_is_there_and_listed() -> None:
    assert set(headprune.__all__) <= set(dir(headprune))
    with pytest.raises(AttributeError, match="has no attribute 'prun'"):
        headprune.prun  # type: ignore[attr-defined]  # noqa: B018
    namespace: dict[str, object] = {}
    exec("from headprune import *", namespace)
    assert set(headprune.__all__) <= set(namespace)


def submodules() -> list[str]:
    actual = pkgutil.walk_packages(headprune.__path__, "headprune.")
    return [module.name for module in actual if not module.name.endswith("__main__")]


def test_no_submodule_stands_in_the_way_of_a_public_name() -> None:
    """Importing headprune.x sets headprune.x, so a module with the name of a public function would replace it."""
    for name in submodules():
        importlib.import_module(name)
    top = {name.split(".")[1] for name in submodules()}
    assert top.isdisjoint(headprune.__all__)
    for name in headprune.__all__:
        assert inspect.isfunction(getattr(headprune, name)) or inspect.isclass(getattr(headprune, name)), name
    for package in (headprune.criteria, headprune.data):  # type: ignore[attr-defined]  # which import their names lazily
        modules = {actual.rpartition(".")[2] for actual in submodules() if actual.startswith(f"{package.__name__}.")}
        assert modules.isdisjoint(package.__all__)
    for package in (headprune.criteria, headprune.data, headprune.signals, headprune.units):  # type: ignore[attr-defined]
        for name in package.__all__:
            assert not inspect.ismodule(getattr(package, name)), f"{package.__name__}.{name}"


def test_rooms_import_first() -> None:
    """Every room can be the first of the package to be imported: no circle of imports hides behind another. Between
    rooms there is none anyway, since imports point one way."""
    rooms = {name.split(".")[1] for name in submodules()}
    names = [name for name in submodules() if name.count(".") == 1 or name.split(".")[2] in ("main", "spec", "pruner")]
    assert {name.split(".")[1] for name in names} == rooms

    def alone(name: str) -> None:
        for module in list(sys.modules):
            if module.partition(".")[0] == "headprune":
                del sys.modules[module]
        importlib.import_module(name)

    assert [name for name in names if in_fork(lambda name=name: alone(name))] == []
