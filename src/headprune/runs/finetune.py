"""Recovery of a run's model into the run's folder: once, or by turns with pruning."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headprune import distributed
from headprune.errors import TrainingError
from headprune.measure.trajectory import Step, plain
from headprune.recovery.pace import Evaluated, Teller
from headprune.recovery.trainer import Fitted, fit, need_training
from headprune.report.card import model_card, recovered_card
from headprune.report.exports import forget_exports
from headprune.report.recovery import origin
from headprune.report.words import left_text
from headprune.runs.experiment import in_precision_of, publish_run, run_experiment
from headprune.runs.recovered import Recovered, is_finished, opened
from headprune.runs.request import Request, Setting, load_model, load_setting, plain_measured, refuse_changes
from headprune.runs.rounds import plan_rounds
from headprune.store.checkpoint import save
from headprune.store.files import write_text
from headprune.store.rundir import read_run

ROUND = "round.json"  # beside the run of a round: what was measured when it was recovered

Tell = Callable[[Mapping[str, Any]], None]


def run_finetune(
    request: Request,
    *,
    overwrite: bool = False,
    on_step: Callable[[Step], None] | None = None,
    on_round: Callable[[str], None] | None = None,
    tell: Tell | None = None,
) -> dict[str, Any]:
    """Recover a run's model into its folder `finetuned`, going on where an earlier process stopped; returns its record.

    With several rounds the run's target is reached from the dense model by turns: a part is pruned, what is left is
    trained, and so on.
    """
    need_training(request.config)
    experiment = request.experiment
    if request.rounds > 1 and request.record["settings"].get("gates"):
        raise TrainingError("Rounds prune as a run of `headprune prune` did, and this one learned; leave out --rounds.")
    plan = plan_rounds(experiment, request.record["result"], request.rounds) if request.rounds > 1 else []
    if plan and request.point is not None:
        raise TrainingError("Rounds lead to the run's own target; leave out --point, or --rounds.")
    settings = request.settings()
    if not overwrite and distributed.on_main(lambda: is_finished(request.run, settings)):
        with opened(request.run, settings) as folder:  # which needs neither the data nor the dense model
            return distributed.on_main(lambda: _published(request, folder))
    with distributed.fail_together():
        refuse_changes(request)
    setting = load_setting(request)
    with opened(request.run, settings, overwrite=overwrite) as folder:
        place = distributed.broadcast(None if folder is None else (folder.path, folder.finished))
        assert place is not None
        path, finished = place
        if not finished:
            recover = _by_turns if plan else _at_once
            found, model, rounds = recover(setting, path, plan, on_step, on_round, tell)
            result = _result(setting, found, model, rounds)
            distributed.on_main(lambda: _keep(request, folder, model, result, rounds))
        return distributed.on_main(lambda: _published(request, folder))


def _keep(
    request: Request,
    folder: Recovered | None,
    model: PreTrainedModel,
    result: Mapping[str, Any],
    rounds: Sequence[Mapping[str, Any]],
) -> None:
    """Save the recovered model with its card, and write down what came out."""
    assert folder is not None
    forget_exports(request.run, f"{folder.path.name}/model")
    save(in_precision_of(request.source, model), folder.path / "model")
    card = recovered_card(_card(request, folder.path, rounds), {**folder.record, **result})
    write_text(folder.path / "model" / "README.md", card)
    folder.finish(result)
    (request.run / "report.html").unlink(missing_ok=True)


def _published(request: Request, folder: Recovered | None) -> dict[str, Any]:
    assert folder is not None
    for leftover in (folder.path / "trainer", *folder.path.glob("round-*/trainer")):
        shutil.rmtree(leftover, ignore_errors=True)
    publish_run(request.run, request.record)
    return folder.record


Recovery = tuple[list[Fitted], PreTrainedModel, list[dict[str, Any]]]


def _at_once(setting: Setting, folder: Path, plan: Any, on_step: Any, on_round: Any, tell: Tell | None) -> Recovery:
    model = load_model(setting.request.source, setting.request.experiment)
    return [_fit(setting, model, folder / "trainer", tell)], model, []


def _by_turns(
    setting: Setting,
    folder: Path,
    plan: Sequence[Mapping[str, Any]],
    on_step: Callable[[Step], None] | None,
    on_round: Callable[[str], None] | None,
    tell: Tell | None,
) -> Recovery:
    """Prune a part of the way, recover, and so on; a round that has its record is not done again."""
    experiment = setting.request.experiment
    start, done = experiment.model, []
    for number, part in enumerate(plan, start=1):
        place = folder / f"round-{number}"
        own = experiment.with_options(model=str(start), **part)
        if number > 1 and experiment.vocabulary is not None:  # which was made smaller in the first round
            own = own.with_options(vocabulary=None, processor=None)
        start = str(place / "recovered")
        known = distributed.broadcast(_read_round(place))
        if known is not None:
            done.append(known)
            continue
        if on_round is not None:
            on_round(f"Round {number} of {len(plan)}")
        record = run_experiment(own, place, measure=False, publish=False, on_step=on_step)
        model = load_model(place / "model", experiment)
        before = setting.measure(model)
        fitted = _fit(setting, model, place / "trainer", tell)
        units = {kind: count for kind, (count, _) in setting.request.record["result"]["units"].items()}
        left = {kind: count for kind, (_, count) in record["result"]["units"].items()}
        about = {
            "left": left_text(units, left),
            "pruned": plain_measured(before),
            "recovered": plain_measured(setting.measure(model)),
            "fitted": _fitted_json(fitted),
        }
        distributed.on_main(functools.partial(_keep_round, place, model, about))
        done.append(json.loads(json.dumps(about)))
    fits = [_fitted_from(one.pop("fitted")) for one in done]
    return fits, load_model(Path(start), experiment), done


def _read_round(place: Path) -> dict[str, Any] | None:
    return json.loads((place / ROUND).read_text()) if (place / ROUND).is_file() else None


def _keep_round(place: Path, model: PreTrainedModel, about: Mapping[str, Any]) -> None:
    save(in_precision_of(place / "model", model), place / "recovered")
    write_text(place / ROUND, json.dumps(about) + "\n")


def _fit(setting: Setting, model: PreTrainedModel, folder: Path, tell: Tell | None) -> Fitted:
    return fit(
        model,
        setting.training,
        task=setting.task,
        config=setting.request.config,
        folder=folder,
        teacher=setting.teacher,
        callbacks=[] if tell is None else [Teller(tell)],
        metric=setting.metric.name,
    )


def _result(
    setting: Setting, found: Sequence[Fitted], model: PreTrainedModel, rounds: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    last = found[-1]
    history, before = [], 0
    for one in found:
        history += [{**entry, "step": entry["step"] + before} for entry in one.history]
        before += one.steps
    return {
        "of": origin(setting.request.record),
        "task": setting.task.name,
        "metric": setting.metric.name,
        "higher_is_better": setting.metric.higher_is_better,
        "samples": {
            "training": last.samples,
            "evaluation": setting.evaluated,
        },
        "dense": setting.dense,
        "pruned": plain_measured(setting.pruned),
        "recovered": plain_measured(setting.measure(model)),
        "steps": last.steps,
        "best_step": last.best_step,
        "stopped_early": last.stopped_early,
        "chosen_by": last.metric,
        "evaluations": [[one.step, plain(one.value)] for one in last.evaluations],
        "seconds": round(sum(one.seconds for one in found), 2),
        "rounds": list(rounds),
        "notes": setting.notes,
        "history": history,
    }


def _card(request: Request, folder: Path, rounds: Sequence[Mapping[str, Any]]) -> str:
    """The card of the pruned model that was recovered: of the run, of its point, or of the last round."""
    if not rounds:
        known = request.source / "README.md"
        return known.read_text() if known.is_file() else model_card(request.record, request.source)
    last, _ = read_run(folder / f"round-{len(rounds)}")
    whole, end = request.record["result"], last["result"]
    before = {kind: count for kind, (count, _) in whole["units"].items()}
    result = {
        **whole,
        "rule": "",
        "agreement": None,
        "mask": end["mask"],
        "heads_after": end["heads_after"],
        "units": {kind: [before[kind], count] for kind, (_, count) in end["units"].items()},
        "widths": {
            site: [count, end["widths"][site][1]]
            for site, (count, _) in (whole.get("widths") or {}).items()
            if site in (end.get("widths") or {})
        },
        "pruned": rounds[-1]["pruned"]["value"],
        "pruned_interval": rounds[-1]["pruned"]["interval"],
    }
    return model_card({**request.record, "result": result, "savings": None}, folder / "model")


def _fitted_json(fitted: Fitted) -> dict[str, Any]:
    return {**vars(fitted), "evaluations": [list(one) for one in fitted.evaluations]}


def _fitted_from(value: Mapping[str, Any]) -> Fitted:
    return Fitted(**{**value, "evaluations": [Evaluated(*one) for one in value["evaluations"]]})
