"""The core is small: what comes with an extra is not needed without it, and where it is, one sentence names it."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import headprune
from headprune.errors import HeadpruneError, MissingPackageError
from headprune.extras import need, require
from run_helpers import environment, in_fork, material
from synthetic_runs import make_run

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
EXTRAS = ("pandas", "datasets", "altair", "vl_convert", "typer", "sklearn", "jinja2", "rich", "PIL", "django")

# Blocks imports as if the packages were not installed. transformers looks for some of them with find_spec, and takes
# them where they are found: so they must not be found, and importing one that is asked for must say which.
BLOCK = """
import importlib.abc, importlib.machinery, importlib.util, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
find = importlib.util.find_spec
def find_spec(name, package=None):
    return None if name.partition(".")[0] in {names!r} else find(name, package)
importlib.util.find_spec = find_spec
"""


def without(names: tuple[str, ...], program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = BLOCK.format(names=names) + program
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment(), timeout=120
    )


def without_here(name: str, arguments: list[str], folder: Path) -> tuple[int, str]:
    """The program in a fork of this process that has lost a package, and headprune's own modules, which may have it
    already: torch need not be imported again. Its exit code, and what it said on stderr."""
    said = folder.parent / f"{folder.name}.err"

    def work() -> None:
        for module in list(sys.modules):
            if module.partition(".")[0] in (name, "headprune"):
                del sys.modules[module]
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
        sys.stderr = os.fdopen(os.dup(2), "w")
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        sys.argv = ["headprune", *arguments]
        logging.getLogger().handlers.clear()
        exec(BLOCK.format(names=(name,)), {})
        try:
            exec(PROGRAM, {})
        except SystemExit as exit:
            sys.stderr.flush()
            os._exit(int(exit.code or 0))

    return in_fork(work), said.read_text()


PROGRAM = "from headprune.__main__ import main; main()"


@pytest.mark.slow
def test_a_pruned_model_loads_with_the_core_alone(tmp_path: Path) -> None:
    model = headprune.load(material().bert)
    headprune.remove(model, [(0, 1), (2, 0), (2, 3)])
    headprune.save(model, tmp_path / "pruned")
    tokens = torch.arange(5, 17)[None]
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
    done = without(
        EXTRAS,
        "import torch, headprune\n"
        "model = headprune.load(sys.argv[1])\n"
        "with torch.no_grad():\n"
        "    torch.save(model(input_ids=torch.arange(5, 17)[None]).logits, sys.argv[2])\n"
        "headprune.remove(model, [(1, 2)])\n"
        "batch = {'input_ids': torch.arange(5, 17).view(2, 6), 'labels': torch.tensor([0, 1])}\n"
        "headprune.score(model, [batch], criterion='gnorm')\n"
        "headprune.save(model, sys.argv[3])\n"
        "print([name for name in sys.modules if name in sys.argv[4].split(',')])\n",
        *(str(tmp_path / name) for name in ("pruned", "logits", "again")),
        ",".join(EXTRAS),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
    torch.testing.assert_close(torch.load(tmp_path / "logits"), expected)
    assert (tmp_path / "again" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_the_program_without_its_packages_says_so(name: str) -> None:
    done = without((name,), PROGRAM)
    assert done.returncode == 2
    assert done.stderr == f"Error: The command line needs {name}; install it with pip install 'headprune[cli]'.\n"
    assert done.stdout == ""


CASES = {
    "table": (
        "pyarrow",
        ["score", "{bert}", "--data", "{data_parquet}"],
        "Reading a parquet file needs pyarrow",
        "data",
    ),
    "data-set": ("datasets", ["score", "{bert}", "--data", "glue"], "Data sets by name need datasets", "data"),
    "images": (
        "PIL",
        ["score", "{vit}", "--data", "{root}/pictures.folder"],
        "Reading image files needs pillow",
        "images",
    ),
    "report": ("altair", ["report", "{root}/run"], "Reports need altair", "report"),
    "libraries-of-a-page": ("vl_convert", ["report", "{root}/run"], "Reports need vl-convert-python", "report"),
    "template": ("jinja2", ["report", "{root}/run"], "Reports need jinja2", "report"),
    "run": (
        "altair",
        ["prune", "{bert}", "--data", "{data_csv}", "--out", "{root}/new"],
        "Reports need altair",
        "report",
    ),
    "figures": ("altair", ["reproduce", "greedy-gnorm", "--out", "{root}/new"], "Figures need altair", "report"),
    "demo": ("django", ["demo", "--out", "{root}/new"], "The demo needs django", "demo"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_program_names_the_extra(case: str, tmp_path: Path) -> None:
    """One sentence, exit code 2, and nothing is written."""
    name, arguments, sentence, extra = CASES[case]
    m = material()
    root = tmp_path
    if "{root}/run" in arguments:
        make_run(root / "run")
    if case == "images":
        root = m.root
    names = {"bert": m.bert, "vit": m.vit, "data_csv": m.data_csv, "data_parquet": m.data_parquet, "root": root}
    filled = [argument.format(**names) for argument in arguments]
    before = sorted(tmp_path.rglob("*"))
    code, said = without_here(name, filled, tmp_path)
    assert code == 2, said
    assert said == f"Error: {sentence}; install it with pip install 'headprune[{extra}]'.\n"
    assert sorted(tmp_path.rglob("*")) == before


def test_in_python_it_is_an_error_of_ours_and_an_import_error() -> None:
    sentence = r"^Whales need no_such_module; install it with pip install 'headprune\[sea\]'\.$"
    with pytest.raises(MissingPackageError, match=sentence) as caught, require("sea", "Whales need"):
        import no_such_module.of_whales  # type: ignore[import-not-found]  # noqa: F401
    assert isinstance(caught.value, HeadpruneError)
    assert isinstance(caught.value, ImportError)
    assert caught.value.name == "no_such_module"
    with pytest.raises(MissingPackageError, match=sentence):
        need(("json", "no_such_module"), "sea", "Whales need")


def test_a_bug_in_our_own_imports_is_not_hidden() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"headprune\.nowhere") as caught, require("sea", "Whales need"):
        import headprune.nowhere  # type: ignore[import-not-found]  # noqa: F401
    assert not isinstance(caught.value, HeadpruneError)
    with pytest.raises(ImportError, match="cannot import name"), require("sea", "Whales need"):
        from json import no_such_name  # type: ignore[attr-defined]  # noqa: F401


def test_every_extra_that_a_sentence_names_exists() -> None:
    """And the command line's own extra brings all that its verbs need but images and the demo."""
    tomllib = pytest.importorskip("tomllib", reason="it came with Python 3.11")
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    sources = "\n".join(path.read_text() for path in (PROJECT.parent / "src").rglob("*.py"))
    named = set(re.findall(r'require\([^"]*"(\w+)", "[A-Z]', sources))
    assert {"cli", "data", "report"} <= named <= set(extras)
    assert "headprune[data,report]" in extras["cli"]
