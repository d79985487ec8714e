"""Code beside a tokenizer is not run, even where a user would say yes to transformers' question:
SECURITY.md promises it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headprune.data import load_examples
from headprune.errors import DataError
from run_helpers import classifier, material, tokenizer

CODE = """
from pathlib import Path
Path(__file__).with_name("RAN").touch()
Path("{mark}").touch()
class Custom:
    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        return cls()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "custom.py").write_text(CODE.format(mark=tmp_path / "RAN"))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "others"


def test_of_a_tokenizer(folder: Path) -> None:
    tokenizer().save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Custom", "auto_map": {"AutoTokenizer": [None, "custom.Custom"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="No tokenizer was found"):
        load_examples(classifier(), material().data_csv, processor=folder)
    assert not (folder.parent / "RAN").exists()
