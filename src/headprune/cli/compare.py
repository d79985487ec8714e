"""The verb `compare`: criteria against each other, for one model or for many, here or on Ray."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from headprune import distributed
from headprune.cli.options import Json, Overwrite, Plugin, print_json, resumable, with_options
from headprune.runs.plugins import import_plugins
from headprune.search.config import VERB_DEFAULTS, stop_settings

Budget = list[str] | None
OTHER_RUN = "Give it several times for several budgets, each with runs of their own."


@with_options("criterion", "method", *stop_settings(), **VERB_DEFAULTS["compare"])
def compare(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Directory for one run per criterion; interrupted ones go on.")],
    model: Annotated[
        list[str] | None, typer.Argument(help="Local folders or hub names; one or more, unless a sweep file has them.")
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="Data as for prune; give it several times for several data sets.")
    ] = None,
    criteria: Annotated[
        str | None,
        typer.Option(
            help="Names with commas between them, such as gnorm,his,inverse:gnorm; with a compensation of its own: "
            "gnorm+lstsq."
        ),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Runs of random, with different seeds.")] = 1,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds with commas between them, each with runs of its own; instead of --seed.")
    ] = None,
    keep_parameters: Annotated[
        Budget, typer.Option(help=f"Compare at this share of the parameters, not along curves. {OTHER_RUN}")
    ] = None,
    keep_flops: Annotated[Budget, typer.Option(help="The same for FLOPs of a forward pass.")] = None,
    keep_memory: Annotated[Budget, typer.Option(help="The same for bytes of weights.")] = None,
    speedup: Annotated[Budget, typer.Option(help="The same for how many times as fast, measured here.")] = None,
    alpha: Annotated[str | None, typer.Option(help="'sweep' picks the alpha of hies on the calibration data.")] = None,
    sweep: Annotated[
        Path | None, typer.Option(help="YAML file with models, data, criteria, seeds, budgets and other options.")
    ] = None,
    on: Annotated[
        str | None, typer.Option(help="'ray' runs several at once on this machine; ray://HOST:PORT on a cluster.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs at once, where Ray is started here; as many as fit by default.")
    ] = None,
    cpus: Annotated[
        int | None, typer.Option(min=1, help="Threads of each run; 1 on Ray by default, else what torch takes.")
    ] = None,
    plugin: Plugin = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    *,
    options: dict[str, Any],
) -> None:
    """Run several criteria from the same dense model on the same data, and say which is best."""
    from headprune.cli.early import check_early, quiet_transformers, without_compensation
    from headprune.criteria.registry import split_names
    from headprune.errors import CriterionError, SweepError
    from headprune.runs.studies.asked import parse_seeds, study_of

    own = {"keep_parameters": keep_parameters, "keep_flops": keep_flops, "keep_memory": keep_memory, "speedup": speedup}
    seed = options.pop("seed")
    if seeds is not None and _given(context, "seed"):
        raise SweepError("--seed and --seeds are both given; leave one of them out.")
    named = {
        "models": model,
        "data": data,
        "criteria": None if criteria is None else split_names(criteria),
        "seeds": [seed] if seeds is None else parse_seeds(seeds),
        **own,
        "trials": trials,
        "plugin": plugin,
    }
    asked = {**options, **named}
    if sweep is not None:
        asked = _with_file(context, sweep, asked)
    import_plugins(asked["plugin"])
    study = study_of(asked)
    for subject in study.subjects:
        texts = {name: str(value) for budget in study.budgets for name, value in budget.items()}
        names = without_compensation(study.criteria)
        check_early(subject["model"], {**study.settings, **subject, **texts}, criteria=names, reports=True)
    if on is not None and distributed.launched():
        raise SweepError("Ray starts processes of its own; give --on without torchrun or accelerate launch.")
    executor = _executor(on, workers, cpus, asked["plugin"])
    if alpha not in (None, "sweep"):
        raise CriterionError(
            f"--alpha takes the word sweep, not {alpha!r}; one value goes into the name: hies(alpha=0.7)."
        )
    if alpha is not None and (study.size > 1 or study.budgets[0]):
        raise SweepError("--alpha sweep is for one comparison along curves: one model, data set and seed, no budget.")

    from headprune.cli.tables import print_comparison
    from headprune.runs.compare import check_sweep, expand, sweep_alpha, with_alpha
    from headprune.runs.studies.plan import plan_study
    from headprune.runs.studies.summary import run_study, write_index

    quiet_transformers()
    groups = plan_study(study, out)
    distributed.start()
    swept = None
    if alpha == "sweep":
        experiment = groups[0].experiment
        names = expand(study.criteria, experiment.repair)
        swept = experiment.with_options(repair=check_sweep(names, experiment.repair))
    with resumable(out):
        if swept is not None:
            best, areas = sweep_alpha(swept)
            listed = ", ".join(f"{a:g}: {area:.4f}" for a, area in areas.items())
            typer.echo(f"alpha of hies = {best:g}, by weighted area on the calibration data ({listed})", err=True)
            groups = plan_study(dataclasses.replace(study, criteria=tuple(with_alpha(names, best))), out)
        with _watch(groups, curve=on is None and len(groups) == 1) as watch:
            found = run_study(groups, executor, watch=watch, overwrite=overwrite)
    if len(found) == 1:
        rows: Any = found[0].rows
        if as_json:
            print_json({"runs": str(out), "criteria": [row.to_json() for row in rows]})
        elif study.budgets[0]:
            from headprune.cli.studies import print_at_budget

            print_at_budget(out, rows)
        else:
            print_comparison(out, rows)
        return
    index = distributed.on_main(lambda: write_index(study, out, found))
    if as_json:
        print_json({"runs": str(out), **index})
    else:
        from headprune.cli.studies import print_study

        print_study(out, found)


def _given(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _with_file(context: typer.Context, sweep: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """What a sweep file asks for; what stands on the command line takes the place of its entry of the same name."""
    from headprune.errors import SweepError
    from headprune.runs.studies.asked import read_sweep

    parameters = {"models": ("model",), "seeds": ("seeds", "seed")}
    said = {name for name in asked if any(_given(context, one) for one in parameters.get(name, (name,)))}
    found = read_sweep(sweep)
    if "pairs" in found and said & {"models", "data"}:
        raise SweepError(f"{sweep} has pairs of models and data; leave out MODEL and --data.")
    return {**asked, **{name: value for name, value in found.items() if name not in said}}


def _executor(on: str | None, workers: int | None, cpus: int | None, plugins: list[str] | None) -> Any:
    """Where the runs are done; refused before torch is imported where that cannot be."""
    from headprune.errors import SweepError

    if on is not None:
        from headprune.runs.studies.on_ray import OnRay

        return OnRay(on, workers=workers, cpus=cpus or 1, plugins=plugins or ())
    if workers is not None:
        raise SweepError("--workers goes with --on ray; without it runs are done one after the other.")

    from headprune.runs.studies.running import OneAfterTheOther

    return OneAfterTheOther(threads=cpus)


def _watch(groups: Any, *, curve: bool) -> Any:
    """The curve of one run after the other, or the table of all."""
    from contextlib import contextmanager

    from headprune.cli.live import live_curve
    from headprune.cli.studies import progress_table
    from headprune.runs.compare import Told

    if not curve:
        return progress_table()

    @contextmanager
    def told() -> Any:
        budget = groups[0].experiment.budget
        with live_curve("Comparing", None if budget is None else budget.measure) as on_step:
            yield Told(on_step.start, on_step)

    return told()
