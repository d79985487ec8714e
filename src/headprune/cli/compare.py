"""The verb `compare`: compares criteria, for one model or for many, on this machine or on Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headprune import distributed
from headprune.cli.options import OUTPUT, Json, Overwrite, Plugin, Seeds, Trials, print_json, resumable, with_options
from headprune.config.groups import COMPARE_DEFAULTS, COMPARE_GROUPS, BudgetOptions, DataOptions, PruningOptions
from headprune.config.option import only
from headprune.runs.plugins import import_plugins

CRITERIA, COMPUTE = "Criteria", "Compute"


@with_options(
    *COMPARE_GROUPS,
    only(
        DataOptions,
        "data",
        type=list[str],
        default=None,
        required=False,
        help="Data as for prune; repeat it for several data sets. Needed unless a study file has it.",
    ),
    only(
        BudgetOptions,
        "keep_parameters",
        type=list[str],
        help="Compare at this share of the parameters, not along curves. Repeat it for several budgets, each with its "
        "own runs.",
    ),
    only(
        PruningOptions,
        "schedule",
        help="The schedule of all criteria that name none of their own: 'greedy', 'one-shot', or with a budget "
        "'rounds'; by default that of each criterion's paper along curves, and 'rounds' with a budget.",
    ),
    only(BudgetOptions, "keep_flops", "keep_memory", type=list[str]),
    only(BudgetOptions, "speedup", type=list[str], help="The same for the measured speed-up on this machine."),
    defaults=COMPARE_DEFAULTS,
)
def compare(
    context: typer.Context,
    out: Annotated[
        Path,
        typer.Option(help="Directory for one run per criterion; interrupted runs are resumed.", rich_help_panel=OUTPUT),
    ],
    model: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help="Local folders or hub names; one or more, unless a study file has them."),
    ] = None,
    criteria: Annotated[
        str | None,
        typer.Option(
            help="Names, separated by commas, such as 'gnorm,his,inverse:gnorm'; a name may have its own schedule and "
            "repair: 'his@greedy', 'gnorm+lstsq'. Needed unless a study file has them.",
            rich_help_panel=CRITERIA,
        ),
    ] = None,
    trials: Trials = 1,
    at: Annotated[
        str | None,
        typer.Option(
            help="Percentages of heads removed at which curves are compared, such as '10,20,30,50'; by default "
            "25,50,75.",
            rich_help_panel=CRITERIA,
        ),
    ] = None,
    alpha: Annotated[
        str | None,
        typer.Option(
            help="'auto' chooses the alpha of hies on validation samples, under its schedule and repair.",
            rich_help_panel=CRITERIA,
        ),
    ] = None,
    seeds: Seeds = None,
    study: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with models, data, criteria, seeds, budgets and other options.", rich_help_panel=CRITERIA
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            help="'ray' runs several at once on this machine; 'ray://HOST:PORT', 'HOST:PORT' or 'auto' on a cluster.",
            rich_help_panel=COMPUTE,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Runs at once, where Ray is started here; as many as fit by default.", rich_help_panel=COMPUTE
        ),
    ] = None,
    cpus: Annotated[
        int | None,
        typer.Option(
            min=1, help="Threads of each run; by default 1 on Ray, else what torch uses.", rich_help_panel=COMPUTE
        ),
    ] = None,
    plugin: Plugin = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    *,
    options: dict[str, Any],
) -> None:
    """Run several criteria from the same dense model on the same data, and rank them."""
    from headprune.cli.preflight import check_early, quiet_transformers, without_suffixes
    from headprune.criteria.registry import split_names
    from headprune.errors import StudyError
    from headprune.runs.studies.spec import check_alpha_word, parse_seeds, study_of

    seed = options.pop("seed")
    if seeds is not None and _on_command_line(context, "seed"):
        raise StudyError("--seed and --seeds are both given; leave one of them out.")
    lists = {
        "models": model,
        "criteria": None if criteria is None else split_names(criteria),
        "seeds": [seed] if seeds is None else parse_seeds(seeds),
        "trials": trials,
        "at": at,
        "plugin": plugin,
    }
    study_options = {**options, **lists}
    if study is not None:
        study_options = _with_file(context, study, study_options)
    import_plugins(study_options["plugin"])
    parsed_study = study_of(study_options)
    check_alpha_word(alpha, parsed_study)
    for subject in parsed_study.subjects:
        texts = {name: str(value) for budget in parsed_study.budgets for name, value in budget.items()}
        names = without_suffixes(parsed_study.criteria)
        check_early(subject["model"], {**parsed_study.settings, **subject, **texts}, criteria=names, reports=True)
    if on is not None and distributed.launched():
        raise StudyError("Ray starts its own processes; use --on without torchrun or accelerate launch.")
    executor = _executor(on, workers, cpus, study_options["plugin"])

    from headprune.cli.comparison_table import print_comparison
    from headprune.cli.progress import live_phases
    from headprune.runs.alpha import FILE, with_chosen_alpha
    from headprune.runs.studies.comparison import refuse_other_files
    from headprune.runs.studies.run_study import run_study
    from headprune.runs.studies.study_runs import make_groups
    from headprune.runs.studies.summary import INDEX, TABLE, write_index

    quiet_transformers()
    groups = make_groups(parsed_study, out)
    distributed.start()
    if len(groups) > 1:
        distributed.on_main(lambda: refuse_other_files([out], INDEX, TABLE))
    with resumable(out):
        choice = None
        if alpha is not None:
            with live_phases("Choosing alpha"):
                parsed_study, choice = with_chosen_alpha(parsed_study, out, overwrite=overwrite)
            typer.echo(f"{choice}; in {out / FILE}", err=True)
            groups = make_groups(parsed_study, out)
        with _progress(groups, curve=on is None and len(groups) == 1) as observer:
            results = run_study(groups, executor, observer=observer, overwrite=overwrite)
    if len(results) == 1:
        rows: Any = results[0].rows
        if as_json:
            chosen = {} if choice is None else {"alpha": choice.to_json()}
            print_json({"runs": str(out), **chosen, "criteria": [row.to_json() for row in rows]})
        elif parsed_study.budgets[0]:
            from headprune.cli.study_tables import print_at_budget

            print_at_budget(out, rows)
        else:
            print_comparison(out, rows)
        return
    index = distributed.on_main(lambda: write_index(parsed_study, out, results))
    if as_json:
        print_json({"runs": str(out), **index})
    else:
        from headprune.cli.study_tables import print_study

        print_study(out, results)


def _on_command_line(context: typer.Context, name: str) -> bool:
    """Whether an option is on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _with_file(context: typer.Context, study: Path, study_options: dict[str, Any]) -> dict[str, Any]:
    """The options with those of a study file; options on the command line have priority."""
    from headprune.errors import StudyError
    from headprune.runs.studies.spec import read_study

    parameters = {"models": ("model",), "seeds": ("seeds", "seed")}
    on_command_line = {
        name for name in study_options if any(_on_command_line(context, each) for each in parameters.get(name, (name,)))
    }
    content = read_study(study)
    if "pairs" in content and on_command_line & {"models", "data"}:
        raise StudyError(f"{study} has pairs of models and data; leave out MODEL and --data.")
    return {**study_options, **{name: value for name, value in content.items() if name not in on_command_line}}


def _executor(on: str | None, workers: int | None, cpus: int | None, plugins: list[str] | None) -> Any:
    """The executor of the runs; raises before torch is imported."""
    from headprune.errors import StudyError

    if on is not None:
        from headprune.runs.studies.ray_executor import RayExecutor

        return RayExecutor(on, workers=workers, cpus=cpus or 1, plugins=plugins or ())
    if workers is not None:
        raise StudyError("--workers needs --on ray; without it one run follows the other.")

    from headprune.runs.studies.run_study import SerialExecutor

    return SerialExecutor(threads=cpus)


def _progress(groups: Any, *, curve: bool) -> Any:
    """The curve of one run after the other, or the table of all."""
    from headprune.cli.progress import live_curve, progress_table

    budget = groups[0].experiment.budget
    return live_curve("Comparing", None if budget is None else budget.measure) if curve else progress_table()
