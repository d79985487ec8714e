"""Code that runs a saved checkpoint in a few lines: with transformers alone, or with headprune."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from headprune.checkpoint.processors import has_tokenizer
from headprune.tasks import TASKS
from headprune.units.slicing.record import NAMES

HERE = "path/to/this/folder"  # in a card, until it is known where the model will be
PIPELINE_TAGS = {task.name: task.pipeline_tag for task in TASKS}
ONE_SECOND = "numpy.zeros(16_000, numpy.float32)"  # of silence; a recording has this form too
PROCESSORS = {
    "feature_extractor": "AutoFeatureExtractor",
    "image_processor": "AutoImageProcessor",
    "tokenizer": "AutoTokenizer",
}
COUNT_PARAMETERS = "print(model.num_parameters())"  # where the inputs depend on more than the task
IMAGE = 'image = Image.new("RGB", (224, 224))  # or Image.open("picture.png")\n'


@dataclass(frozen=True)
class Recipe:
    """How models of a task are used: by a pipeline of transformers, or by code where there is none."""

    task: str  # as headprune calls it
    auto: str  # the class of transformers that loads such a model
    code: str  # with `pipe`, or with `model` and its processors
    pipeline: str = ""
    processors: tuple[str, ...] = ("tokenizer",)
    imports: tuple[str, ...] = ()
    install: tuple[str, ...] = ()  # beside torch and transformers


class Example(NamedTuple):
    """A snippet, and the sentence above it."""

    text: str
    code: str


RECIPES = (
    Recipe(
        "sequence-classification",
        "AutoModelForSequenceClassification",
        'print(pipe("What a lovely day."))',
        "text-classification",
    ),
    Recipe(
        "token-classification",
        "AutoModelForTokenClassification",
        'print(pipe("Ada was born in London."))',
        "token-classification",
    ),
    Recipe(
        "question-answering",
        "AutoModelForQuestionAnswering",
        """inputs = tokenizer("Where was Ada born?", "Ada was born in London.", return_tensors="pt")
outputs = model(**inputs)
first, last = int(outputs.start_logits.argmax()), int(outputs.end_logits.argmax())
print(tokenizer.decode(inputs["input_ids"][0, first : last + 1]))""",
    ),
    Recipe(
        "multiple-choice",
        "AutoModelForMultipleChoice",
        """choices = ["It rains.", "It is sunny."]
inputs = tokenizer(["What a lovely day."] * len(choices), choices, padding=True, return_tensors="pt")
outputs = model(**{name: value[None] for name, value in inputs.items()})
print(choices[int(outputs.logits.argmax())])""",
    ),
    Recipe(
        "image-classification",
        "AutoModelForImageClassification",
        f"{IMAGE}print(pipe(image))",
        "image-classification",
        ("image_processor",),
        ("from PIL import Image",),
        ("pillow",),
    ),
    Recipe(
        "audio-classification",
        "AutoModelForAudioClassification",
        f"print(pipe({ONE_SECOND}))",
        "audio-classification",
        ("feature_extractor",),
        ("import numpy",),
    ),
    Recipe(
        "ctc",
        "AutoModelForCTC",
        f"print(pipe({ONE_SECOND}))",
        "automatic-speech-recognition",
        ("tokenizer", "feature_extractor"),
        ("import numpy",),
    ),
    Recipe(
        "similarity",
        "AutoModelForZeroShotImageClassification",
        f'{IMAGE}print(pipe(image, candidate_labels=["a cat", "a dog"]))',
        "zero-shot-image-classification",
        ("tokenizer", "image_processor"),
        ("from PIL import Image",),
        ("pillow",),
    ),
    Recipe(
        "seq2seq-lm",
        "AutoModelForSpeechSeq2Seq",
        f"print(pipe({ONE_SECOND}))",
        "automatic-speech-recognition",
        ("tokenizer", "feature_extractor"),
        ("import numpy",),
    ),
    Recipe(
        "seq2seq-lm",
        "AutoModelForSeq2SeqLM",
        """inputs = tokenizer("What a lovely day.", return_tensors="pt")
ids = model.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=20)
print(tokenizer.decode(ids[0], skip_special_tokens=True))""",
    ),
    Recipe(
        "causal-lm",
        "AutoModelForCausalLM",
        'print(pipe("Once upon a time", max_new_tokens=20, do_sample=False))',
        "text-generation",
    ),
    Recipe("masked-lm", "AutoModelForMaskedLM", 'print(pipe(f"What a {pipe.tokenizer.mask_token} day."))', "fill-mask"),
    Recipe(
        "features",
        "AutoModel",
        'print(pipe("What a lovely day.", return_tensors=True).shape)',
        "feature-extraction",
    ),
)


def usage(folder: Path | None, task: str, tag: str) -> list[Example]:
    """What a model card shows: plain transformers first where it loads the checkpoint, then headprune. `tag` is the
    hub's name of the task."""
    config = read_config(folder) or {}
    alone = Example("", f"import headprune\n\n{load_line(HERE)}\n")
    if folder is None or not plain_loads(config):
        return [alone]
    from transformers.pipelines import get_supported_tasks

    snippets = []
    if has_tokenizer(folder) or _has_processor(folder):
        if recipe_of(config, task) is not None:
            snippets.append(transformers_snippet(config, task, HERE))
        elif tag in get_supported_tasks():
            snippets.append(pipeline_snippet(config, tag, HERE))
    if not snippets or "\nmodel = " not in snippets[0]:
        snippets.append(model_snippet(config, task, HERE))
    above = "With transformers alone, as any other model:"
    if config.get("auto_map"):
        above = (
            "With transformers alone. Layers differ in size, so the folder brings the code that builds them, "
            "`modeling_headprune.py`, which transformers runs with `trust_remote_code=True`:"
        )
    first, *others = snippets
    by_transformers = [Example(above, first), *(Example("", code) for code in others)]
    return [*by_transformers, alone._replace(text="With headprune, which runs no code from the folder:")]


def pipeline_tag(task: str, folder: Path | None) -> str:
    """What hubs and `pipeline` call the task of a model; empty where they have no word for it."""
    tag = PIPELINE_TAGS.get(task, "")
    images = folder is not None and not has_tokenizer(folder) and _has_processor(folder)
    return f"image-{tag}" if tag == "feature-extraction" and images else tag


def read_config(folder: Path | None) -> dict[str, Any] | None:
    """config.json of a checkpoint; None where there is none that can be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder is not None else None
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def plain_loads(config: Mapping[str, Any]) -> bool:
    """Whether transformers alone loads a checkpoint with this config.json: it brings its code, its numbers are those of
    its weights, or nothing was removed from it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if config.get("auto_map"):
        return True
    native = (config.get("headprune") or {}).get("dense")
    whole = not any(config.get(name) for name in NAMES.values())
    return bool(native or whole) and config.get("model_type") in CONFIG_MAPPING_NAMES


def transformers_snippet(config: Mapping[str, Any], task: str, folder: str) -> str:
    """Python that runs a checkpoint where headprune is not installed, from its config.json and the name of its task."""
    recipe, arguments = recipe_of(config, task), _arguments(config, folder)
    if recipe is not None and recipe.pipeline:
        return pipeline_snippet(config, recipe.pipeline, folder, recipe)
    names, processors = _processor_lines(recipe, arguments)
    imports, model = _model_lines(config, recipe, arguments, *names)
    code = recipe.code if recipe else COUNT_PARAMETERS
    return _joined([*(recipe.imports if recipe else ()), imports], [*processors, model, code])


def pipeline_snippet(config: Mapping[str, Any], name: str, folder: str, recipe: Recipe | None = None) -> str:
    """Python that makes a pipeline of transformers, and uses it as the recipe says."""
    lines = [f'pipe = pipeline("{name}", model={_arguments(config, folder)})', *([recipe.code] if recipe else [])]
    return _joined([*(recipe.imports if recipe else ()), "from transformers import pipeline"], lines)


def model_snippet(config: Mapping[str, Any], task: str, folder: str) -> str:
    """Python that loads the model by transformers, and no more."""
    imports, model = _model_lines(config, recipe_of(config, task), _arguments(config, folder))
    return _joined([imports], [model])


def load_line(folder: str) -> str:
    """The line of Python that loads a checkpoint with headprune."""
    return f"model = headprune.load({quoted(folder)})"


def headprune_snippet(config: Mapping[str, Any], task: str, folder: str) -> str:
    """Python that runs a checkpoint with headprune, which runs no code from its folder."""
    location, recipe = quoted(folder), recipe_of(config, task)
    names, processors = _processor_lines(recipe, location, after_model=True)
    lines = [load_line(folder), *processors]
    if recipe is not None and recipe.pipeline:
        keywords = "".join(f", {name}={name}" for name in recipe.processors)
        lines.append(f'pipe = pipeline("{recipe.pipeline}", model=model{keywords})')
        names.append("pipeline")
    imports = ["import headprune", *([f"from transformers import {', '.join(names)}"] if names else [])]
    code = recipe.code if recipe else COUNT_PARAMETERS
    return _joined([*(recipe.imports if recipe else ()), *imports], [*lines, code])


def install_line(config: Mapping[str, Any], task: str, *packages: str) -> str:
    """What pip has to bring: these packages, and what inputs of this task need beside them."""
    recipe = recipe_of(config, task)
    return " ".join(["pip install", *packages, *(recipe.install if recipe else ())])


def recipe_of(config: Mapping[str, Any], task: str) -> Recipe | None:
    """That of this task, or of another that the model's class is for; None for models that need more than that."""
    autos = _auto_classes(config)
    # Of models without a head, those of texts are all used alike.
    fitting = [
        recipe for recipe in RECIPES if recipe.auto in autos and (recipe.task != "features" or "vocab_size" in config)
    ]
    of_task = [recipe for recipe in fitting if recipe.task == task]
    known = task in {recipe.task for recipe in RECIPES} or not task
    return next(iter(of_task or (fitting if known else ())), None)


def quoted(text: str) -> str:
    """A text as Python writes it, in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def _arguments(config: Mapping[str, Any], folder: str) -> str:
    """The folder as an argument, and that its code may be run where it brings some."""
    return quoted(folder) + (", trust_remote_code=True" if config.get("auto_map") else "")


def _has_processor(folder: Path) -> bool:
    return (folder / "preprocessor_config.json").is_file()


def _auto_classes(config: Mapping[str, Any]) -> set[str]:
    """The Auto classes of transformers that give this checkpoint's class."""
    architecture = (config.get("architectures") or [""])[0]
    if config.get("auto_map"):
        return {name for name, path in config["auto_map"].items() if str(path).endswith(f".{architecture}")}
    from transformers.models.auto import modeling_auto

    names = set()
    for name in (name for name in dir(modeling_auto) if name.startswith("AutoModel")):
        mapping = getattr(getattr(modeling_auto, name), "_model_mapping", None)
        classes = getattr(mapping, "_model_mapping", {}).get(config.get("model_type"), ())
        if architecture in ((classes,) if isinstance(classes, str) else classes):
            names.add(name)
    return names


def _class_name(config: Mapping[str, Any]) -> str:
    """What loads a model without a recipe: the Auto class that finds it, or its class where none does."""
    autos = sorted(_auto_classes(config))
    if autos:
        return "AutoModel" if "AutoModel" in autos else autos[0]
    return (config.get("architectures") or ["AutoModel"])[0]


def _model_lines(config: Mapping[str, Any], recipe: Recipe | None, arguments: str, *names: str) -> tuple[str, str]:
    """The line that imports the class of a model and others, and the one that loads the model."""
    name = recipe.auto if recipe is not None else _class_name(config)
    return (
        f"from transformers import {', '.join(sorted([name, *names]))}",
        f"model = {name}.from_pretrained({arguments})",
    )


def _processor_lines(
    recipe: Recipe | None, arguments: str, *, after_model: bool = False
) -> tuple[list[str], list[str]]:
    """The classes of what prepares inputs, and the lines that load them. A tokenizer reads the config of the model, and
    asks about the code that this names, unless it gets the config from the model."""
    processors = sorted(recipe.processors if recipe else ())
    lines = []
    for name in processors:
        config = ", config=model.config" if after_model and name == "tokenizer" else ""
        lines.append(f"{name} = {PROCESSORS[name]}.from_pretrained({arguments}{config})")
    return [PROCESSORS[name] for name in processors], lines


def _joined(imports: list[str], lines: list[str]) -> str:
    ordered = sorted(imports, key=lambda line: (line.startswith("from"), line))
    return "\n".join([*ordered, "", *lines]) + "\n"
