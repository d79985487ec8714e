"""Uploads a pruned model to the hub, with its card, the report of its run and its curve."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from headprune.checkpoint.paths import is_run, local_folder, refuse_bad_config
from headprune.errors import CheckpointError
from headprune.reports.card import plain_card, run_card
from headprune.reports.page import charts, render
from headprune.reports.run_view import load_runs
from headprune.run_folder import read_run
from headprune.snippets.checkpoints import HERE

CARD, REPORT, CURVE = "README.md", "report.html", "curve.png"
# The files of a model; pickles, which run code when they are loaded, and other files are not uploaded.
UPLOADED = re.compile(
    r"\.(safetensors|json|txt|model|spm|tiktoken|py|md|png|html|jinja)$|^(LICENSE|NOTICE)\b", flags=re.IGNORECASE
)
RUN = "RUN"  # the folder of the run in the uploaded page
NOT_UPLOADED = re.compile(r"^\.|^(optimizer|scheduler|rng_state|training_args)\b|\.lock$")  # files of a training


def push_to_hub(
    source: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    token: str | None = None,
    commit_message: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> str:
    """Upload a model in one commit, and return the URL of the commit; the repository is created if necessary.

    `source` is a run, whose pruned model is uploaded, or the folder of any saved model, such as RUN/finetuned/model or
    RUN/models/POINT. The model card, with `repo_id` in its snippets, is uploaded too, and, where the model belongs to a
    run, report.html and the curve of the run as a picture in the card. Local files are not changed.
    """
    _refuse_bad_name(repo_id)
    folder = local_folder(source)
    if folder is None:
        raise CheckpointError(f"There is no directory {source}; name a run, or the folder of a saved model.")
    refuse_bad_config(folder / "config.json")
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} has no *.safetensors file, so there is no model to upload.")
    if (token or get_token()) is None:
        raise CheckpointError("Uploading needs a token of the hub; log in with `hf auth login`, or pass token=....")
    run = _run_of(folder)
    files = _files(folder, run)
    api = HfApi(token=token, library_name="headprune")
    message = commit_message or f"Upload {repo_id.rpartition('/')[2]}, pruned by headprune"
    try:
        name = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        files[CARD] = _card_of(files[CARD], name)
        if run is not None and isinstance(page := files.get(REPORT), bytes):
            files[REPORT] = _page_of(page, folder.resolve().relative_to(run).as_posix(), name)
        operations = [CommitOperationAdd(path_in_repo=path, path_or_fileobj=files[path]) for path in sorted(files)]
        commit = api.create_commit(
            name, operations, commit_message=message, revision=revision, create_pr=create_pr, repo_type="model"
        )
    except OfflineModeIsEnabled:
        raise CheckpointError("HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it.") from None
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(getattr(error, "server_message", None) or error).split())
        raise CheckpointError(
            f"The hub refused {repo_id} ({reason[:300]}); check the name, the token's rights and the connection."
        ) from None
    return str(commit.pr_url or commit.commit_url)


def _refuse_bad_name(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        raise CheckpointError(
            f"{repo_id!r} is not a valid repository name; use one such as user/model, of letters, digits, - _ and dots."
        ) from None


def _files(folder: Path, run: Path | None) -> dict[str, Path | bytes]:
    """Name in the repository -> file or content."""
    files: dict[str, Path | bytes] = {
        file.relative_to(folder).as_posix(): file
        for file in folder.rglob("*")
        if file.is_file()
        and UPLOADED.search(file.name)
        and not any(NOT_UPLOADED.search(part) for part in file.relative_to(folder).parts)
    }
    card = (folder / CARD).read_text() if (folder / CARD).is_file() else ""
    if run is not None:
        record, _ = read_run(run)
        if "result" in record:
            card = card or run_card(run, folder.resolve().relative_to(run).as_posix())
            files[CURVE], files[REPORT] = _curve(run), _report(run)
            card = _with_curve(card, record["result"]["metric"])
    files[CARD] = (card or plain_card(folder)).encode()
    return files


def _run_of(folder: Path) -> Path | None:
    """The run that a model belongs to: RUN/model, RUN/models/POINT, RUN/finetuned/model."""
    parents = [folder.resolve().parent, folder.resolve().parent.parent]
    return next((parent for parent in parents if is_run(parent)), None)


def _card_of(card: Path | bytes, name: str) -> bytes:
    text = card.read_text() if isinstance(card, Path) else card.decode()
    return text.replace(HERE, name).encode()


def _with_curve(card: str, metric: str) -> str:
    before, use, after = card.partition("## Use\n")
    if not use or f"]({CURVE})" in card:
        return card
    return f"{before}![{metric} while units are removed]({CURVE})\n\n[The report of the run]({REPORT})\n\n{use}{after}"


def _curve(run: Path) -> bytes:
    from headprune.reports.save_figures import png

    return png(charts(load_runs([run]), saved=True)["metric"])


def _report(run: Path) -> bytes:
    """The report without local paths."""
    (view,) = load_runs([run])
    record = {**view.record, "settings": _without_folders(view.settings)}
    return render([replace(view, record=record, shown_path=RUN)]).encode()


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_folders(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _page_of(page: bytes, inside: str, name: str) -> bytes:
    """The page with the name of the repository in place of the folder of the model."""
    return re.sub(rf"\b{RUN}/{re.escape(inside)}(?![\w/.-])", lambda _: name, page.decode()).encode()
