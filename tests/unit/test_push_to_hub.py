"""What would be uploaded, file by file, at the border to huggingface_hub; nothing leaves the machine."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import OfflineModeIsEnabled

import headprune
import run_helpers
from headprune.errors import CheckpointError
from headprune.reports.page import write_report
from headprune.runs import hub
from helpers import contents
from pictures import png_size
from synthetic_runs import make_run

EXPORT: dict[str, Any] = {
    "runtime": "onnx",
    "quantize": None,
    "task": "sequence-classification",
    "check": {
        "samples": 4,
        "difference": 1e-6,
        "tolerance": 1e-4,
        "tokens": None,
        "metric": None,
        "pytorch": None,
        "exported": None,
        "agreement": None,
    },
    "latency": {"threads": 1, "repeats": 9, "batch_1": {"pruned": 9.4}},
    "megabytes": {"pruned": 301.0},
    "of": "model",
    "snippet": 'print("DIR/model.onnx")\n',
    "install": "onnxruntime numpy",
    "title": "ONNX Runtime",
}


class Hub:
    """Takes what is uploaded, as the hub would."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, Any]] = {}
        self.commits: list[dict[str, Any]] = []

    def create_repo(self, api: HfApi, repo_id: str, **options: Any) -> Any:
        name = repo_id if "/" in repo_id else f"me/{repo_id}"
        self.repositories[name] = {**options, "token": api.token}
        return SimpleNamespace(repo_id=name)

    def create_commit(self, api: HfApi, repo_id: str, operations: Any, **options: Any) -> Any:
        files = {}
        for operation in operations:
            assert isinstance(operation, CommitOperationAdd)
            with operation.as_file() as stream:
                files[operation.path_in_repo] = stream.read()
        assert len(files) == len(operations)
        self.commits.append({"repo": repo_id, "files": files, **options})
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1", pr_url=None)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Hub:
    actual = Hub()
    monkeypatch.setattr(HfApi, "create_repo", lambda api, *a, **o: actual.create_repo(api, *a, **o))
    monkeypatch.setattr(HfApi, "create_commit", lambda api, *a, **o: actual.create_commit(api, *a, **o))
    monkeypatch.setattr(hub, "get_token", lambda: None)
    return actual


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run as `prune` leaves it, with a model of its own."""
    folder = make_run(tmp_path / "run", samples=40)
    model = headprune.load(run_helpers.material().bert)
    headprune.remove(model, [(0, 1), (1, 0)])
    headprune.save(model, folder / "model")
    return folder


def test_a_run_is_uploaded_with_card_report_and_curve(run: Path, taken: Hub, tmp_path: Path) -> None:
    (run / "model" / "optimizer.pt").write_bytes(b"of a training")
    (run / "model" / ".cache").mkdir()
    (run / "model" / ".cache" / "note").write_text("hidden")
    before = contents(run)
    address = headprune.push_to_hub(run, "me/pruned", token="t", private=True)
    assert address == "https://hub/me/pruned/commit/1"
    assert taken.repositories == {"me/pruned": {"private": True, "exist_ok": True, "token": "t"}}
    (commit,) = taken.commits
    own = {file.name for file in (run / "model").iterdir() if file.is_file()} - {"optimizer.pt"}
    assert set(commit["files"]) == own | {"README.md", "report.html", "curve.png"}
    for name in own:
        assert commit["files"][name] == (run / "model" / name).read_bytes()
    assert {"config.json", "model.safetensors", "modeling_headprune.py", "tokenizer.json"} <= own
    curve = write_report([run], tmp_path / "report.html", figure_folder=tmp_path).with_name("metric.png").read_bytes()
    assert commit["files"]["curve.png"] == curve
    assert png_size(curve) > (1000, 500)
    assert b"<html" in commit["files"]["report.html"]
    card = commit["files"]["README.md"].decode()
    header = yaml.safe_load(card.split("---\n")[1])
    assert header["base_model"] == "org/tiny-bert"
    assert "](curve.png)" in card
    assert "](report.html)" in card
    assert 'from_pretrained("me/pruned", trust_remote_code=True)' in card
    assert "path/to/this/folder" not in card
    assert "pruned by headprune" in commit["commit_message"].lower()
    assert contents(run) == before  # nothing here is changed


def test_only_files_of_a_model_are_uploaded(run: Path, taken: Hub) -> None:
    kept = ("LICENSE", "vocab.txt", "spiece.model", "chat_template.jinja", "1_Pooling/config.json")
    for name in (*kept, "pytorch_model.bin", "weights.pt", "data.pkl", "notes.csv", "secret.env", "old.ckpt"):
        (run / "model" / name).parent.mkdir(exist_ok=True)
        (run / "model" / name).write_text("{}")
    headprune.push_to_hub(run, "me/pruned", token="t")
    (commit,) = taken.commits
    assert set(kept) <= set(commit["files"])
    assert not [name for name in commit["files"] if name.endswith((".bin", ".pt", ".pkl", ".csv", ".env", ".ckpt"))]


def test_the_report_names_no_folder_of_this_machine(run: Path, taken: Hub, tmp_path: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    record["settings"] |= {"model": str(tmp_path / "dense"), "data": str(tmp_path / "train.tsv")}
    (run / "run.json").write_text(json.dumps(record))
    exported = {**EXPORT, "out": str(tmp_path / "exports" / "onnx")}
    (run / "exports.json").write_text(json.dumps({"format": 1, "exports": [exported]}))
    local = write_report([run], run / "report.html").read_text()
    assert str(tmp_path) in local
    headprune.push_to_hub(run, "me/pruned", token="t")
    page = html.unescape(taken.commits[0]["files"]["report.html"].decode())
    assert str(tmp_path) not in page
    assert 'headprune.load("me/pruned")' in page
    assert '"onnx/model.onnx"' in page
    assert "--data train.tsv" in page
    assert "--out RUN" in page
    assert (run / "report.html").read_text() == local


def test_the_card_of_the_folder_goes_with_what_was_written_into_it(run: Path, taken: Hub) -> None:
    written = "---\nlicense: mit\n---\n\n# mine\n\n## Use\n\nload path/to/this/folder\n"
    (run / "model" / "README.md").write_text(written)
    headprune.push_to_hub(run / "model", "pruned", token="t", commit_message="mine", revision="v2", create_pr=True)
    (commit,) = taken.commits
    assert commit["repo"] == "me/pruned"
    assert (commit["commit_message"], commit["revision"], commit["create_pr"]) == ("mine", "v2", True)
    card = commit["files"]["README.md"].decode()
    assert card.startswith("---\nlicense: mit\n---\n\n# mine\n")
    assert card.count("](curve.png)") == 1
    assert "load me/pruned" in card
    assert (run / "model" / "README.md").read_text() == written


def test_a_folder_without_a_run_has_a_card_as_well(run: Path, taken: Hub, tmp_path: Path) -> None:
    alone = tmp_path / "elsewhere" / "deep" / "alone"
    headprune.save(headprune.load(run), alone)
    headprune.push_to_hub(alone, "me/alone", token="t")
    (commit,) = taken.commits
    assert "curve.png" not in commit["files"]
    assert "report.html" not in commit["files"]
    card = commit["files"]["README.md"].decode()
    assert "2 attention heads removed from 2 sites" in card
    assert 'AutoModelForSequenceClassification.from_pretrained("me/alone", trust_remote_code=True)' in card


def one_sentence(text: str) -> None:
    assert "\n" not in text
    assert re.search(r"[.]$", text)


@pytest.mark.parametrize("name", ["a/b/c", "", "sp ace", "x" * 200])
def test_bad_names_are_refused(name: str, run: Path, taken: Hub) -> None:
    with pytest.raises(CheckpointError, match="is not a valid repository name") as error:
        headprune.push_to_hub(run, name, token="t")
    one_sentence(str(error.value))
    assert not taken.repositories


def test_without_a_token_nothing_is_tried(run: Path, taken: Hub) -> None:
    with pytest.raises(CheckpointError, match="needs a token of the hub; log in with `hf auth login`") as error:
        headprune.push_to_hub(run, "me/pruned")
    one_sentence(str(error.value))
    assert not taken.repositories


def test_what_is_no_model_is_refused(tmp_path: Path, run: Path, taken: Hub) -> None:
    with pytest.raises(CheckpointError, match="There is no directory"):
        headprune.push_to_hub(tmp_path / "nowhere", "me/pruned", token="t")
    with pytest.raises(CheckpointError, match="There is no directory"):
        headprune.push_to_hub("org/other", "me/pruned", token="t")
    for file in (run / "model").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match="no model to upload"):
        headprune.push_to_hub(run, "me/pruned", token="t")
    unfinished = make_run(tmp_path / "unfinished", stop=None)
    with pytest.raises(CheckpointError, match="is not finished"):
        headprune.push_to_hub(unfinished, "me/pruned", token="t")
    assert not taken.repositories


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set"),
        (OSError("connection\nrefused"), r"refused me/pruned \(connection refused\); check"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(
    raised: Exception, said: str, run: Path, taken: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(HfApi, "create_repo", fail)
    with pytest.raises(CheckpointError, match=said) as error:
        headprune.push_to_hub(run, "me/pruned", token="t")
    one_sentence(str(error.value))
    assert json.loads((run / "run.json").read_text())
