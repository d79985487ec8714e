"""The code with which reports and cards say how a model is used: it runs, for every task."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

import headprune
from headprune.snippets.checkpoints import headprune_snippet, install_line, plain_loads, transformers_snippet
from headprune.tasks import task_of
from helpers import pruned
from run_helpers import bert, tokenizer
from snippets import executed
from task_models import CASES
from zoo import ZOO

BY_ID = {case.id: case.build for case in CASES}
TEXT = ("sequence-classification-bert", "token-classification-bert", "question-answering-bert", "multiple-choice-bert")
WRITERS = ("masked-lm-bert", "causal-lm-llama", "seq2seq-lm-t5")
SOUND = ("audio-classification-wav2vec2", "ctc-wav2vec2")
OTHERS = ("image-classification-vit", "image-text-to-text-llava", "features-bert", "similarity-clip", "all-attention")
OWN = {
    "features-bert": lambda: bert(transformers.BertModel),
    "similarity-clip": ZOO["clip"].build,
    "all-attention": ZOO["all-attention"].build,
}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def ears(folder: Path) -> Any:
    """What turns sound into inputs, and letters into texts."""
    letters = folder / "letters.json"
    known = ["<pad>", *"abcdefgh", "|", "<unk>"]
    letters.write_text(json.dumps({letter: number for number, letter in enumerate(known)}))
    words = transformers.Wav2Vec2CTCTokenizer(str(letters), bos_token=None, eos_token=None)
    return transformers.Wav2Vec2Processor(transformers.Wav2Vec2FeatureExtractor(), words)


def write(folder: Path, name: str) -> str:
    """A portable checkpoint of a pruned model, with what prepares its inputs; its task."""
    model = (OWN.get(name) or BY_ID[name])()
    headprune.remove(model, [(0, 1)] if "llama" not in name else [(0, 0), (0, 1)])
    processor: Any = tokenizer(token_types="bert" in name)
    if name in SOUND:
        processor = ears(folder.parent)
    elif name.startswith("image-classification"):
        processor = ViTImageProcessorPil(size={"height": 16, "width": 16})
    headprune.save(model, folder, processor=processor, portable=True)
    if name.startswith("similarity"):
        ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
    return task_of(model).name


def test_the_code_for_every_task_runs(tmp_path: Path) -> None:
    """With transformers where headprune is missing, and with headprune: both print the same."""
    alone, own = {}, {}
    for name in (*TEXT, *WRITERS, *SOUND, *OTHERS):
        task = write(tmp_path / name, name)
        config = config_of(tmp_path / name)
        assert plain_loads(config)
        alone[name] = transformers_snippet(config, task, name)
        own[name] = headprune_snippet(config, task, name)
        assert "trust_remote_code=True" in alone[name]
        assert "headprune" not in alone[name]
        assert "trust_remote_code" not in own[name]
    actual = executed(alone, tmp_path, missing=["headprune"])
    assert all(actual.values())
    assert executed(own, tmp_path) == actual


def test_the_code_is_short() -> None:
    config = {"architectures": ["BertForSequenceClassification"], "model_type": "bert"}
    task = "sequence-classification"
    served = {"AutoModel": "x.BertModel", "AutoModelForSequenceClassification": "x.BertForSequenceClassification"}
    assert transformers_snippet({**config, "auto_map": served}, task, "RUN") == (
        "from transformers import pipeline\n\n"
        'pipe = pipeline("text-classification", model="RUN", trust_remote_code=True)\n'
        'print(pipe("What a lovely day."))\n'
    )
    assert 'model="RUN")' in transformers_snippet(config, task, "RUN")
    assert headprune_snippet(config, task, "RUN").startswith(
        "import headprune\nfrom transformers import AutoTokenizer, pipeline\n\n"
        'model = headprune.load("RUN")\n'
        'tokenizer = AutoTokenizer.from_pretrained("RUN", config=model.config)\n'
        'pipe = pipeline("text-classification", model=model, tokenizer=tokenizer)\n'
    )
    assert install_line(config, task, "transformers", "torch") == "pip install transformers torch"
    images = {"architectures": ["ViTForImageClassification"], "model_type": "vit"}
    assert install_line(images, "image-classification", "headprune") == "pip install headprune pillow"


def test_folders_are_quoted() -> None:
    """Whatever their names hold, the code is Python and means them."""
    config = {"architectures": ["BertForSequenceClassification"], "model_type": "bert"}
    for folder in ('a "b"', "c\\d", "e'f", "g\nh", "gr\u00fcn \U0001f600"):
        for made in (transformers_snippet, headprune_snippet):
            tree = ast.parse(made(config, "sequence-classification", folder))
            assert folder in {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


@pytest.mark.parametrize("task", ["", "token-classification", "not-a-task"])
def test_the_class_decides_where_the_task_does_not(task: str) -> None:
    """Runs of long ago did not write the task down, and a task may be another than the class is for."""
    config = {"architectures": ["BertForMaskedLM"], "model_type": "bert"}
    text = transformers_snippet(config, task, "RUN")
    assert ("fill-mask" in text) == (task != "not-a-task")
    assert ("AutoModelForMaskedLM" in text) == (task == "not-a-task")


def test_a_class_without_a_name_among_the_auto_classes_loads_itself() -> None:
    config = {"architectures": ["CLIPTextModelWithProjection"], "model_type": "clip"}
    text = transformers_snippet(config, "features", "RUN")
    assert "from transformers import CLIPTextModelWithProjection\n" in text
    assert 'model = CLIPTextModelWithProjection.from_pretrained("RUN")' in text


def test_what_transformers_alone_loads(tmp_path: Path) -> None:
    """Numbers that fit, code that comes along, or nothing removed; not a plain checkpoint that lost heads here and
    there, nor a class that transformers has not."""
    headprune.save(pruned(ZOO["bert"])[0], tmp_path / "ragged", portable=False)
    assert not plain_loads(config_of(tmp_path / "ragged"))
    headprune.save(pruned(ZOO["bert"])[0], tmp_path / "portable", portable=True)
    assert plain_loads(config_of(tmp_path / "portable"))
    headprune.save(ZOO["bert"].build(), tmp_path / "dense")
    assert plain_loads(config_of(tmp_path / "dense"))
    llama = ZOO["llama"].build()
    headprune.remove(llama, [(site, 0) for site in range(3)])
    headprune.save(llama, tmp_path / "even")
    assert plain_loads(config_of(tmp_path / "even"))
    headprune.save(ZOO["all-attention"].build(), tmp_path / "own", portable=False)
    assert not plain_loads(config_of(tmp_path / "own"))
