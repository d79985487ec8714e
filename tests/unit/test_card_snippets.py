"""What the card of a model says about using it is true where headprune is not installed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import checkpoint_process
import headprune
import run_helpers
from headprune.reports.card import model_card
from headprune.snippets.checkpoints import HERE, PIPELINE_TAGS
from headprune.tasks import TASKS
from synthetic_runs import make_run

TEXT = "w7 w8 w9 w10"
# Runs the snippets of every card in its folder, and says what they gave.
PROGRAM = """
import json, os, re
from pathlib import Path

said = {}
for name in json.loads(sys.argv[1]):
    os.chdir(Path(sys.argv[2]) / name)
    text = Path("path/to/this/folder/README.md").read_text().partition("## Use")[2]
    made = {}
    for code in re.findall("```python\\n(.*?)```", text, re.DOTALL):
        if "import headprune" not in code:
            exec(code, made)
    weights = {key: float(value.double().sum()) for key, value in made["model"].state_dict().items()}
    answer = made["pipe"](sys.argv[3])
    same = all(
        bool((value == other).all())
        for value, other in zip(made["model"].state_dict().values(), made["pipe"].model.state_dict().values())
    )
    kind = type(made["model"])
    said[name] = {"class": kind.__name__, "home": kind.__module__, "weights": weights, "pipe": answer, "same": same}
print("\\n" + json.dumps(said))
"""


def card_of(folder: Path, task: str) -> str:
    """The card of a run with this model, of which only the settings matter here."""
    record = json.loads((make_run(folder.parent / f"run-{folder.name}") / "run.json").read_text())
    return model_card({**record, "task": task}, folder)


@pytest.fixture(scope="module")
def cards(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    root, m = tmp_path_factory.mktemp("cards"), run_helpers.material()
    uneven, even = headprune.load(m.bert), headprune.load(m.llama)
    headprune.remove(uneven, [(0, 1), (1, 0), (1, 2)])
    headprune.remove(even, [head for site in headprune.resolve(even) for head in site.unit(0)])
    models = {"uneven": (uneven, "sequence-classification"), "even": (even, "causal-lm")}
    texts = {}
    for name, (model, task) in models.items():
        folder = headprune.save(model, root / name / HERE)
        texts[name] = card_of(folder, task)
        (folder / "README.md").write_text(texts[name])
        shutil.rmtree(folder.parent / "run-folder", ignore_errors=True)
    said = checkpoint_process.without_headprune(PROGRAM, json.dumps(list(models)), root, TEXT)
    return {name: model for name, (model, _) in models.items()}, texts, json.loads(said.splitlines()[-1])


@pytest.mark.parametrize("name", ["uneven", "even"])
def test_snippets_give_the_pruned_model_without_headprune(name: str, cards: Any) -> None:
    models, texts, said = cards
    model, about = models[name], said[name]
    assert about["class"] == type(model).__name__
    assert about["home"].startswith("transformers_modules." if name == "uneven" else "transformers.models.")
    expected = {key: float(value.double().sum()) for key, value in model.state_dict().items()}
    assert about["weights"] == expected
    assert about["same"]
    assert ("trust_remote_code=True" in texts[name]) == (name == "uneven")
    assert texts[name].index("from transformers import pipeline") < texts[name].index("import headprune")


def test_the_pipeline_of_the_card_says_what_the_model_says(cards: Any) -> None:
    model = cards[0]["uneven"]
    with torch.no_grad():
        logits = model(**run_helpers.tokenizer()(TEXT, return_tensors="pt")).logits[0]
    (answer,) = cards[2]["uneven"]["pipe"]
    assert answer["label"] == model.config.id2label[int(logits.argmax())]
    assert answer["score"] == pytest.approx(float(logits.softmax(-1).max()), abs=1e-5)


def test_the_header_names_the_task(cards: Any) -> None:
    tags = {name: yaml.safe_load(text.split("---\n")[1])["pipeline_tag"] for name, text in cards[1].items()}
    assert tags == {"uneven": "text-classification", "even": "text-generation"}
    assert all(re.fullmatch(r"[a-z0-9-]+", PIPELINE_TAGS[task.name]) for task in TASKS)


def test_headprune_alone_where_plain_transformers_cannot(tmp_path: Path) -> None:
    model = headprune.load(run_helpers.material().bert)
    headprune.remove(model, [(0, 1)])
    text = card_of(headprune.save(model, tmp_path / "model", portable=False), "sequence-classification")
    assert "from transformers" not in text
    assert f'headprune.load("{HERE}")' in text
