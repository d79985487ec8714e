"""The documentation is true: its Python runs, its commands parse, its tables are those of the code, and it builds."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import socket
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import properties
import run_helpers
from headprune.cli.main import app
from headprune.cli.option_tables import commands_of, with_tables
from headprune.criteria import REGISTRY
from headprune.measure.metrics import METRICS
from headprune.search.methods import METHODS
from headprune.tasks import TASKS
from headprune.tasks.table import markdown_table
from headprune.units.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FIRST_MODEL = DOCS / "quickstart.md"
GROUPS = ["Start", "Prune", "Train", "Ship", "Scale", "Methods", "Reference"]
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```(?P<language>\w+)[^\n]*\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)[^)]*\)")
BENCHMARK_FILE = re.compile(r"`(benchmarks/[\w./-]+)`")
TOP_PAGES = [ROOT / file for file in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
EVERY_PAGE = [*TOP_PAGES, *PAGES[1:]]
# Tables whose rows are named by more than their first column, by page and head of that column: how many columns.
KEY_COLUMNS = {
    ("docs/all-attention.md", "model"): 3,
    ("docs/export.md", "runtime"): 2,
    ("docs/scale.md", "model"): 2,
    ("docs/scale.md", "schedule"): 2,
    ("docs/scale.md", "work"): 3,
}
SHORT = 50  # characters of a sentence that may stand on a page again
PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )")
PROGRAM: Any = typer.main.get_command(app)
COMMANDS = commands_of(PROGRAM)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, *languages: str) -> list[tuple[str, int, str]]:
    """(language, line, text) of every block in these languages."""
    text = text_of(page)
    return [
        (match["language"], text.count("\n", 0, match.start("body")), match["body"])
        for match in FENCE.finditer(text)
        if match["language"] in languages
    ]


def pages_with(language: str) -> list[Any]:
    return [pytest.param(page, id=name(page)) for page in PAGES if blocks(page, language)]


def table_rows(text: str) -> list[str]:
    """The names in the first column of tables whose first column is code."""
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


# --- Python ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with small models and data where the documentation has its placeholders, and no network."""
    material = run_helpers.material()
    shutil.copytree(material.bert, tmp_path / "path/to/a/classifier")
    shutil.copytree(material.llama, tmp_path / "path/to/a/language-model")
    shutil.copy(material.data_tsv, tmp_path / "dev.tsv")
    shutil.copy(material.data_tsv, tmp_path / "train.tsv")
    held_out = run_helpers.sentences(12, seed=5)
    labels = run_helpers.mostly_right(run_helpers.classifier(), held_out)
    rows = [{"text": text, "label": label} for text, label in zip(held_out, labels, strict=True)]
    run_helpers.write_rows(tmp_path / "test.tsv", rows)
    shutil.copy(material.words_txt, tmp_path / "text.txt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def refuse(*_: Any) -> None:
        raise AssertionError("The documentation's code reached for the network.")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    return tmp_path


@pytest.fixture
def clean_registry() -> Iterator[None]:
    """The criteria and methods as they were, whatever an example registers."""
    before = dict(REGISTRY), dict(METHODS)
    yield
    for registry, known in zip((REGISTRY, METHODS), before, strict=True):
        registry.clear()
        registry.update(known)


@pytest.fixture
def page_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Where the Python blocks of a page are executed, one after the other."""
    module = types.ModuleType("a_page_of_the_documentation")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def execute(page: Path, line: int, code: str, module: types.ModuleType) -> None:
    # Empty lines before the block make the traceback point into the page.
    exec(compile("\n" * line + code, str(page), "exec"), module.__dict__)


@pytest.mark.parametrize("page", [page for page in pages_with("python") if page.id != name(FIRST_MODEL)])
@pytest.mark.usefixtures("stand_ins", "clean_registry", "clean_table")
def test_python_blocks_run(page: Path, page_module: types.ModuleType) -> None:
    for _, line, code in blocks(page, "python"):
        execute(page, line, code, page_module)


@pytest.mark.usefixtures("stand_ins")
def test_the_page_about_the_first_model_runs_from_top_to_bottom(page_module: types.ModuleType) -> None:
    """Its commands too, because its Python loads what they have written."""
    pytest.importorskip("onnxruntime", reason="the page exports to it")
    for language, line, text in blocks(FIRST_MODEL, "console", "python"):
        if language == "python":
            execute(FIRST_MODEL, line, text, page_module)
            continue
        for words in commands_in(text):
            # Whether a tiny model can be made twice as fast depends on the machine; its FLOPs do not.
            done = run_helpers.headprune(*shlex.split(shlex.join(words).replace("--speedup 2", "--keep-flops 0.5")))
            assert done.code == 0, f"headprune {shlex.join(words)}: {done.err}"


# --- command lines ---------------------------------------------------------------------------------------------------


def commands_in(text: str) -> list[list[str]]:
    """The arguments of every `headprune` line of a block."""
    lines = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
    return [words[1:] for words in lines if words[:1] == ["headprune"]]


def refuse_bad_command(words: list[str]) -> None:
    """Parse as the program would, without running anything."""
    verb, rest = verb_of(words)
    if verb in ("--help", "--version"):
        return
    assert verb in COMMANDS, f"there is no verb {verb}"
    if "--help" not in rest:
        COMMANDS[verb].make_context(verb, rest, parent=PROGRAM.context_class(PROGRAM))


def verb_of(words: list[str]) -> tuple[str, list[str]]:
    """The verb, of one word or two, and the rest of a command."""
    count = 2 if " ".join(words[:2]) in COMMANDS else 1
    return " ".join(words[:count]), words[count:]


@pytest.mark.parametrize("page", pages_with("console"))
def test_console_blocks_parse(page: Path) -> None:
    for _, _, text in blocks(page, "console"):
        for words in commands_in(text):
            try:
                refuse_bad_command(words)
            except Exception as error:
                pytest.fail(f"headprune {shlex.join(words)}: {getattr(error, 'message', '') or error}")


@pytest.mark.parametrize("words", [["prune", "MODEL"], ["score", "M", "--data", "f", "--nonsense"], ["fly"]])
def test_a_bad_command_would_be_noticed(words: list[str]) -> None:
    with pytest.raises(Exception, match=r"Missing|No such option|no verb"):
        refuse_bad_command(words)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_named_in_sentences_exist(page: Path) -> None:
    for span in re.findall(r"`headprune ([a-z][^`]*)`", FENCE.sub("", text_of(page))):
        verb, rest = verb_of(span.split())
        assert verb in {*COMMANDS, *PROGRAM.commands}, span
        parameters = COMMANDS[verb].params if verb in COMMANDS else []
        known = {option for parameter in parameters for option in parameter.opts}
        assert {word for word in rest if word.startswith("--")} <= known | {"--help"}, span


# --- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["cli.md", "runs.md"])
def test_tables_of_options_are_those_of_the_program(page: str) -> None:
    assert text_of(DOCS / page) == with_tables(text_of(DOCS / page)), "run python -m headprune.cli.option_tables docs"


def test_every_option_of_every_verb_is_documented() -> None:
    start, *sections = re.split(r"^## ", text_of(DOCS / "cli.md"), flags=re.MULTILINE)
    documented = {section.partition("\n")[0]: section for section in sections}
    assert set(documented) == set(COMMANDS)
    for verb, command in [("", PROGRAM), *COMMANDS.items()]:
        flags = {parameter.opts[0] for parameter in command.params if parameter.opts[0].startswith("--")}
        assert flags == set(re.findall(r"^\| `(--[a-z0-9-]+)`", documented[verb] if verb else start, re.MULTILINE))


@pytest.mark.parametrize("criterion", sorted(REGISTRY))
def test_every_criterion_has_its_page(criterion: str) -> None:
    kind = REGISTRY[criterion]
    page = text_of(DOCS / "criteria" / f"{criterion}.md")
    for heading in ("Formula", "Reference", "Options", "Needs", "When to use it", "When not", "Examples"):
        assert f"\n## {heading}\n" in page, heading
    fields: Any = dataclasses.fields(kind)
    written = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", page, re.MULTILINE))
    assert {key: value.lower() for key, value in written.items()} == {
        field.name: str(field.default).lower().replace("e-07", "e-7") for field in fields
    }
    for reference in re.findall(r"arXiv \d+\.\d+", kind.reference):
        assert reference in page
    assert f"\n| [`{criterion}`]({criterion}.md) |" in text_of(DOCS / "criteria" / "index.md")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_its_row_with_its_settings(method: str) -> None:
    one = METHODS[method]
    row = re.search(rf"^\| (\[)?`{re.escape(method)}`.*$", text_of(DOCS / "methods" / "index.md"), re.MULTILINE)
    assert row is not None
    _, _, *cells, _, _ = (re.sub(r"\]\(.*|[\[`]", "", cell).strip() for cell in row[0].split("|"))
    assert cells == [one.criterion, one.repair, one.widths, str(one.rounds)]
    if method != "headprune":
        page = text_of(
            DOCS
            / "methods"
            / ("baselines.md" if one.reference in ("chance", "the size of weights") else f"{method}.md")
        )
        assert f"--method {method} " in page
        for reference in re.findall(r"arXiv \d+\.\d+", one.reference):
            assert reference in page


def test_the_table_of_tasks_is_that_of_the_code() -> None:
    start, end = "<!-- tasks: made by headprune.tasks.table.markdown_table() -->", "<!-- end of tasks -->"
    written = text_of(DOCS / "data.md").partition(start)[2].partition(end)[0]
    assert written.strip() == markdown_table().strip()


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_data_of_every_task_is_described(task: Any) -> None:
    assert f"\n| `{task.name}` |" in text_of(DOCS / "data.md")


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_is_described(metric: str) -> None:
    section = text_of(DOCS / "pruning.md").partition("\n## Metrics\n")[2].partition("\n## ")[0]
    assert f"\n| `{metric}` |" in section


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_is_named(family: Any) -> None:
    row = re.search(rf"^\| `{re.escape(family.name)}` \|.*$", text_of(DOCS / "families.md"), re.MULTILINE)
    assert row is not None
    _, _, model_types, _, width, quirk, _, _ = (cell.strip() for cell in row[0].split("|"))
    assert tuple(re.findall(r"`([^`]+)`", model_types)) == family.model_types
    assert width == f"`{family.head_dim}`"
    assert quirk == (f"`{family.quirk}`" if family.quirk else "-")


def test_every_extra_is_in_the_table() -> None:
    section = text_of(FIRST_MODEL).partition("\n## Extras\n")[2]
    assert sorted(table_rows(section)) == sorted(project()["optional-dependencies"])


def test_one_sentence_says_what_headprune_is() -> None:
    sentence = project()["description"]
    assert PROGRAM.help == yaml.safe_load(text_of(ROOT / "mkdocs.yml"))["site_description"] == sentence
    for page in (ROOT / "README.md", DOCS / "index.md"):
        assert text_of(page).split("\n\n")[1].replace("\n", " ") == sentence, page


def project() -> Any:
    """The table [project] of pyproject.toml."""
    tomllib = pytest.importorskip("tomllib", reason="it came with Python 3.11")
    return tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]


# --- text ---


def repeated(parts: Iterable[Any]) -> list[Any]:
    return [part for part, count in Counter(parts).items() if count > 1]


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a page as rows of cells: the head, the line under it, and the rows."""
    blocks_of_rows = re.findall(r"(?:^\|.*\|\n)+", FENCE.sub("", text), re.MULTILINE)
    return [[[cell.strip() for cell in row.split("|")[1:-1]] for row in rows.splitlines()] for rows in blocks_of_rows]


def rows_written_twice(page: str, text: str) -> list[tuple[str, ...]]:
    """The keys that two rows of one table have."""
    keys = []
    for number, (head, _, *rows) in enumerate(tables(text)):
        columns = KEY_COLUMNS.get((page, head[0]), 1)
        keys += [(str(number), *row[:columns]) for row in rows]
    return [key[1:] for key in repeated(keys)]


def sentences(text: str) -> list[str]:
    """The sentences of a page outside of code, tables, headings and comments, each on one line."""
    prose = re.sub(r"^\s*(?:\|.*\||#.*|<!--.*)$", "", FENCE.sub("\n\n", text), flags=re.MULTILINE)
    paragraphs = [" ".join(part.split()) for part in PARAGRAPH.split(prose)]
    return [sentence for part in paragraphs for sentence in re.split(r"(?<=[.:;!?])\s+", part.lstrip("-* "))]


def sentences_written_twice(text: str) -> list[str]:
    return repeated(sentence for sentence in sentences(text) if len(sentence) > SHORT)


@pytest.mark.parametrize("page", EVERY_PAGE, ids=name)
def test_nothing_is_written_twice_on_a_page(page: Path) -> None:
    assert rows_written_twice(name(page), text_of(page)) == []
    assert sentences_written_twice(text_of(page)) == []


def test_a_second_copy_would_be_noticed() -> None:
    row, sentence = "| `a` | b |\n", "A sentence that is longer than the fifty characters that are allowed."
    table = f"| option | meaning |\n|---|---|\n{row}"
    once = f"# Page\n\n{sentence}\n\n- Another.\n\n{table}"
    assert rows_written_twice("page.md", f"{once}\n{table}") == sentences_written_twice(once) == []
    assert rows_written_twice("page.md", once + row) == [("`a`",)]
    wrapped = sentence.replace(" that is", "\n  that is")
    assert sentences_written_twice(f"{once}\n- First. {wrapped}\n") == [sentence]
    assert sentences_written_twice(f"{once}\n```text\n{sentence}\n```\n") == []


# --- the site --------------------------------------------------------------------------------------------------------


def pages_of(entry: Any) -> list[str]:
    """The pages of an entry of the navigation, in order."""
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in pages_of(part)]


def test_navigation_and_home_page_have_the_same_groups_with_all_pages() -> None:
    navigation = yaml.safe_load(text_of(ROOT / "mkdocs.yml"))["nav"]
    groups = {title: pages_of(pages) for group in navigation for title, pages in group.items()}
    assert list(groups) == GROUPS
    listed = [page for pages in groups.values() for page in pages]
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text_of(DOCS / "index.md"), re.MULTILINE | re.DOTALL))
    for title, pages in groups.items():
        assert set(LINK.findall(sections[title])) == set(pages) - {"index.md"}, title


def test_invariants_name_tests_that_exist_and_every_promise() -> None:
    text = text_of(DOCS / "invariants.md")
    files = re.findall(r"`(tests/[\w/]+\.py)`", text)
    assert files
    assert [file for file in files if not (ROOT / file).is_file()] == []
    missing = [promise.__name__ for promise in properties.PROMISES if f"`{promise.__name__}`" not in text]
    assert missing == []


@pytest.mark.parametrize("page", TOP_PAGES, ids=name)
def test_links_of_pages_outside_of_the_site_lead_somewhere(page: Path) -> None:
    links = LINK.findall(text_of(page))
    assert links
    assert page.name != "README.md" or "docs/index.md" in links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_files_of_benchmarks_that_pages_name_exist() -> None:
    """Their results too, as these are the measurements behind the numbers."""
    named = {file: name(page) for page in EVERY_PAGE for file in BENCHMARK_FILE.findall(text_of(page))}
    assert "benchmarks/results/scale.json" in named
    assert {file: page for file, page in named.items() if not (ROOT / file).exists()} == {}


def test_the_site_builds_without_warnings_and_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(REGISTRY)
    loaded = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")
    for page in pages:
        assert not loaded.findall(text_of(page)), page.relative_to(site)
