"""Code that runs a pruned checkpoint in a few lines: with transformers alone, or with headprune. Tests execute it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headprune.units.cutting.record import NAMES

SECOND = "numpy.zeros(16_000, numpy.float32)"  # of silence; a recording has this form too
PARTS = {
    "feature_extractor": "AutoFeatureExtractor",
    "image_processor": "AutoImageProcessor",
    "tokenizer": "AutoTokenizer",
}


@dataclass(frozen=True)
class Way:
    """How models of a task are used: by a pipeline of transformers, or by code where there is none."""

    task: str  # as headprune calls it
    auto: str  # the class of transformers that loads such a model
    code: str  # with `pipe`, or with `model` and its parts
    pipeline: str = ""
    parts: tuple[str, ...] = ("tokenizer",)  # what prepares inputs
    imports: tuple[str, ...] = ()
    install: tuple[str, ...] = ()  # beside torch and transformers


WAYS = (
    Way(
        "sequence-classification",
        "AutoModelForSequenceClassification",
        'print(pipe("What a lovely day."))',
        "text-classification",
    ),
    Way(
        "token-classification",
        "AutoModelForTokenClassification",
        'print(pipe("Ada was born in London."))',
        "token-classification",
    ),
    Way(
        "question-answering",
        "AutoModelForQuestionAnswering",
        """given = tokenizer("Where was Ada born?", "Ada was born in London.", return_tensors="pt")
found = model(**given)
first, last = int(found.start_logits.argmax()), int(found.end_logits.argmax())
print(tokenizer.decode(given["input_ids"][0, first : last + 1]))""",
    ),
    Way(
        "multiple-choice",
        "AutoModelForMultipleChoice",
        """choices = ["It rains.", "It is sunny."]
given = tokenizer(["What a lovely day."] * len(choices), choices, padding=True, return_tensors="pt")
found = model(**{name: value[None] for name, value in given.items()})
print(choices[int(found.logits.argmax())])""",
    ),
    Way(
        "image-classification",
        "AutoModelForImageClassification",
        'image = Image.new("RGB", (224, 224))  # or Image.open("picture.png")\nprint(pipe(image))',
        "image-classification",
        ("image_processor",),
        ("from PIL import Image",),
        ("pillow",),
    ),
    Way(
        "audio-classification",
        "AutoModelForAudioClassification",
        f"print(pipe({SECOND}))",
        "audio-classification",
        ("feature_extractor",),
        ("import numpy",),
    ),
    Way(
        "ctc",
        "AutoModelForCTC",
        f"print(pipe({SECOND}))",
        "automatic-speech-recognition",
        ("tokenizer", "feature_extractor"),
        ("import numpy",),
    ),
    Way(
        "similarity",
        "AutoModelForZeroShotImageClassification",
        'image = Image.new("RGB", (224, 224))  # or Image.open("picture.png")\n'
        'print(pipe(image, candidate_labels=["a cat", "a dog"]))',
        "zero-shot-image-classification",
        ("tokenizer", "image_processor"),
        ("from PIL import Image",),
        ("pillow",),
    ),
    Way(
        "seq2seq-lm",
        "AutoModelForSpeechSeq2Seq",
        f"print(pipe({SECOND}))",
        "automatic-speech-recognition",
        ("tokenizer", "feature_extractor"),
        ("import numpy",),
    ),
    Way(
        "seq2seq-lm",
        "AutoModelForSeq2SeqLM",
        """given = tokenizer("What a lovely day.", return_tensors="pt")
found = model.generate(input_ids=given["input_ids"], attention_mask=given["attention_mask"], max_new_tokens=20)
print(tokenizer.decode(found[0], skip_special_tokens=True))""",
    ),
    Way(
        "causal-lm",
        "AutoModelForCausalLM",
        'print(pipe("Once upon a time", max_new_tokens=20, do_sample=False))',
        "text-generation",
    ),
    Way("masked-lm", "AutoModelForMaskedLM", 'print(pipe(f"What a {pipe.tokenizer.mask_token} day."))', "fill-mask"),
    Way(
        "features",
        "AutoModel",
        'print(pipe("What a lovely day.", return_tensors=True).shape)',
        "feature-extraction",
    ),
)
SIZE = "print(model.num_parameters())"  # where what goes in depends on more than the task


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
    way, place = way_of(config, task), _place(config, folder)
    if way is not None and way.pipeline:
        return pipeline_snippet(config, way.pipeline, folder, way)
    names, prepared = _prepared(way, place)
    imports, model = _loaded(config, way, place, *names)
    return _text([*(way.imports if way else ()), imports], [*prepared, model, way.code if way else SIZE])


def pipeline_snippet(config: Mapping[str, Any], name: str, folder: str, way: Way | None = None) -> str:
    """Python that makes a pipeline of transformers, and uses it where it is said how."""
    lines = [f'pipe = pipeline("{name}", model={_place(config, folder)})', *([way.code] if way else [])]
    return _text([*(way.imports if way else ()), "from transformers import pipeline"], lines)


def model_snippet(config: Mapping[str, Any], task: str, folder: str) -> str:
    """Python that loads the model by transformers, and no more."""
    imports, model = _loaded(config, way_of(config, task), _place(config, folder))
    return _text([imports], [model])


def headprune_snippet(config: Mapping[str, Any], task: str, folder: str) -> str:
    """Python that runs a checkpoint with headprune, which runs no code from its folder."""
    place, way = quoted(folder), way_of(config, task)
    names, prepared = _prepared(way, place, known=True)
    lines = [f"model = headprune.load({place})", *prepared]
    if way is not None and way.pipeline:
        parts = "".join(f", {part}={part}" for part in way.parts)
        lines.append(f'pipe = pipeline("{way.pipeline}", model=model{parts})')
        names.append("pipeline")
    imports = ["import headprune", *([f"from transformers import {', '.join(names)}"] if names else [])]
    return _text([*(way.imports if way else ()), *imports], [*lines, way.code if way else SIZE])


def install_line(config: Mapping[str, Any], task: str, *packages: str) -> str:
    """What pip has to bring: these packages, and what inputs of this task need beside them."""
    way = way_of(config, task)
    return " ".join(["pip install", *packages, *(way.install if way else ())])


def way_of(config: Mapping[str, Any], task: str) -> Way | None:
    """The way of this task, or of another that the model's class is for; None for models that need more than that."""
    autos = _autos(config)
    # Of models without a head, those of texts are all used alike.
    fitting = [way for way in WAYS if way.auto in autos and (way.task != "features" or "vocab_size" in config)]
    own = [way for way in fitting if way.task == task]
    known = task in {way.task for way in WAYS} or not task
    return next(iter(own or (fitting if known else ())), None)


def _place(config: Mapping[str, Any], folder: str) -> str:
    """The folder as an argument, and that its code may be run where it brings some."""
    return quoted(folder) + (", trust_remote_code=True" if config.get("auto_map") else "")


def quoted(text: str) -> str:
    """A text as Python writes it, in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def _autos(config: Mapping[str, Any]) -> set[str]:
    """The Auto classes of transformers that give this checkpoint's class."""
    own = (config.get("architectures") or [""])[0]
    if config.get("auto_map"):
        return {name for name, kind in config["auto_map"].items() if str(kind).endswith(f".{own}")}
    from transformers.models.auto import modeling_auto

    found = set()
    for name in (name for name in dir(modeling_auto) if name.startswith("AutoModel")):
        mapping = getattr(getattr(modeling_auto, name), "_model_mapping", None)
        kinds = getattr(mapping, "_model_mapping", {}).get(config.get("model_type"), ())
        if own in ((kinds,) if isinstance(kinds, str) else kinds):
            found.add(name)
    return found


def _class(config: Mapping[str, Any]) -> str:
    """What loads a model that has no way of its own: the Auto class that finds it, or its class where none does."""
    autos = sorted(_autos(config))
    if autos:
        return "AutoModel" if "AutoModel" in autos else autos[0]
    return (config.get("architectures") or ["AutoModel"])[0]


def _loaded(config: Mapping[str, Any], way: Way | None, place: str, *names: str) -> tuple[str, str]:
    """The line that imports the class of a model and others, and the one that loads the model."""
    kind = way.auto if way is not None else _class(config)
    imported = ", ".join(sorted([kind, *names]))
    return f"from transformers import {imported}", f"model = {kind}.from_pretrained({place})"


def _prepared(way: Way | None, place: str, *, known: bool = False) -> tuple[list[str], list[str]]:
    """The classes of what prepares inputs, and the lines that load them. A tokenizer reads the config of the model, and
    asks about the code that this names, unless it is `known` by then."""
    parts = sorted(way.parts if way else ())
    lines = []
    for part in parts:
        config = ", config=model.config" if known and part == "tokenizer" else ""
        lines.append(f"{part} = {PARTS[part]}.from_pretrained({place}{config})")
    return [PARTS[part] for part in parts], lines


def _text(imports: list[str], lines: list[str]) -> str:
    ordered = sorted(imports, key=lambda line: (line.startswith("from"), line))
    return "\n".join([*ordered, "", *lines]) + "\n"
