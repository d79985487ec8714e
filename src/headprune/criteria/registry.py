"""The registry of criteria: each is registered beside its code, and made from a short text such as
"hies(alpha=0.7)"."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_type_hints

from headprune.errors import CriterionError, RegistrationError, warn_renamed

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from headprune.signals import Request, SiteRequest
    from headprune.tasks import Labels, Task
    from headprune.units import Kind, Member, Site

INVERSE = "inverse:"
KINDS: tuple[Kind, ...] = ("heads", "neurons")
CURVE_SCHEDULES = ("greedy", "one-shot")
NAME = re.compile(r"[a-z][a-z0-9_-]*$")
SPEC = re.compile(r"(?P<name>[^()]+)(\((?P<options>.*)\))?$")


class Criterion:
    """Turns a model and batches into a score [sites x heads], higher = more important.

    A subclass is a dataclass whose fields are its options, of one of two kinds. One that streams names its `requests`,
    reduces the answers of a batch to sums over its samples, and computes the score from the sums over all batches, so
    that scores of shards of the data can be merged. The other gathers something at every site, such as its tokens
    (`site_request`), and scores one site after the other at the end of the data (`score_site`). A criterion of weights
    alone overrides `from_weights`.
    """

    name: ClassVar[str]
    reference: ClassVar[str]
    use: ClassVar[str]
    schedule: ClassVar[str] = "greedy"  # along curves, as published: scored again after every removal, or "one-shot"
    # Samples that its paper scores on. A run takes them where the user names no number and nothing is repaired, since a
    # repair needs more.
    calibration_samples: ClassVar[int | None] = None
    revision: ClassVar[int] = 1  # rises when the name alone comes to mean another score

    def as_of(self, revision: int) -> Criterion:
        """What this name and these options meant in an earlier revision, in the words of today."""
        return self

    def requests(self) -> tuple[Request, ...]:
        return ()

    def sums(self, answers: Mapping[Request, torch.Tensor]) -> dict[str, torch.Tensor]:
        """From the answers on one batch, sums over its samples, each [sites x heads] or with leading axes."""
        raise NotImplementedError

    def score(self, sums: Mapping[str, torch.Tensor], samples: int, kept: torch.Tensor) -> torch.Tensor:
        """From the sums over all samples, the score [sites x heads]; `kept` is the mask of the heads that are left."""
        raise NotImplementedError

    def site_request(self) -> SiteRequest | None:
        """What is gathered at every site, for a criterion that does not stream."""
        return None

    def score_site(self, model: PreTrainedModel, site: Site, gathered: Any) -> torch.Tensor:
        """The score of every member of a site, from its weights and from what was gathered there in all the data."""
        raise NotImplementedError

    def predict_site(
        self, model: PreTrainedModel, site: Site, gathered: Any, removed: Sequence[int], *, repaired: bool
    ) -> torch.Tensor | None:
        """Predicted scores of the members that stay when these ids are removed and, where `repaired`, the output map is
        solved again; None where that needs another pass."""
        return None

    def from_weights(self, model: PreTrainedModel, sites: Sequence[Site]) -> torch.Tensor:
        raise NotImplementedError

    @property
    def all_requests(self) -> tuple[Request, ...]:
        """All requests for data; none for a criterion of weights alone."""
        gathered = self.site_request()
        return self.requests() if gathered is None else (gathered,)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of units it has a score for: those that all its requests cover.

        A criterion of weights alone overrides this, and otherwise scores heads only.
        """
        requests = self.all_requests
        return (
            tuple(kind for kind in KINDS if requests and all(kind in request.kinds for request in requests))
            or KINDS[:1]
        )

    def rearranged(
        self,
        chosen: Sequence[Member],
        model: PreTrainedModel,
        sites: Sequence[Site],
        batches: Sequence[Mapping[str, Any]],
        task: Task,
        labels: Labels,
    ) -> list[Member]:
        """Members that leave instead of those chosen by their scores, as many of every site: for criteria that know
        which units to remove together."""
        return list(chosen)

    @property
    def needs_labels(self) -> bool:
        return any(request.needs_labels for request in self.requests())

    @property
    def by_batch(self) -> bool:
        """Whether its score is one of whole batches, so that it depends on which samples are in one."""
        return any(request.backward is not None and request.backward[1] == "batch" for request in self.requests())

    @property
    def needs(self) -> list[str]:
        """What it needs beside the weights, for messages."""
        named = [need for request in self.all_requests for need in request.needs]
        named = [need for need in dict.fromkeys(named) if need != "data"] or named[:1]
        return [*(["labels"] if self.needs_labels else []), *named]

    def __str__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields if getattr(self, f.name) != f.default]
        return self.name + (f"({','.join(changed)})" if changed else "")


class Inverted(Criterion):
    """The inverse of a criterion: its least important units count as most important."""

    def __init__(self, inner: Criterion) -> None:
        self.inner = inner
        self.name = INVERSE + inner.name  # type: ignore[misc]
        self.reference, self.use = inner.reference, f"the opposite order of {inner.name}, as a control"  # type: ignore[misc]
        self.calibration_samples, self.revision = inner.calibration_samples, inner.revision  # type: ignore[misc]
        self.schedule = inner.schedule  # type: ignore[misc]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Inverted) and other.inner == self.inner

    def __hash__(self) -> int:
        return hash((Inverted, self.inner))

    def as_of(self, revision: int) -> Criterion:
        return Inverted(self.inner.as_of(revision))

    def requests(self) -> tuple[Request, ...]:
        return self.inner.requests()

    def sums(self, answers: Mapping[Request, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self.inner.sums(answers)

    def score(self, sums: Mapping[str, torch.Tensor], samples: int, kept: torch.Tensor) -> torch.Tensor:
        return -self.inner.score(sums, samples, kept)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return self.inner.kinds

    def from_weights(self, model: PreTrainedModel, sites: Sequence[Site]) -> torch.Tensor:
        return -self.inner.from_weights(model, sites)

    def site_request(self) -> SiteRequest | None:
        return self.inner.site_request()

    def score_site(self, model: PreTrainedModel, site: Site, gathered: Any) -> torch.Tensor:
        return -self.inner.score_site(model, site, gathered)

    def __str__(self) -> str:
        return INVERSE + str(self.inner)


REGISTRY: dict[str, type[Criterion]] = {}
ALIASES: dict[str, str] = {}  # names of earlier versions
Class = TypeVar("Class", bound=type[Criterion])


def criterion(
    name: str, *, reference: str = "", use: str = "", schedule: str = "greedy", aliases: Sequence[str] = ()
) -> Callable[[Class], Class]:
    """Register a criterion class under a name, which then works everywhere a criterion is named. `schedule` is the one
    it was published with, which `compare` uses: "greedy" or "one-shot".

    @headprune.criterion("loudest", use="when large head outputs matter")
    class Loudest(headprune.Criterion):
        ...
    """
    if not NAME.match(name):
        raise RegistrationError(
            f"{name!r} is not a name for a criterion; use lower-case letters, digits, - and _, starting with a letter."
        )

    if schedule not in CURVE_SCHEDULES:
        raise RegistrationError(f"schedule of {name} must be one of {', '.join(CURVE_SCHEDULES)}, not {schedule!r}.")

    def register(kind: Class) -> Class:
        for candidate in (name, *aliases):
            if candidate in REGISTRY or candidate in ALIASES:
                raise RegistrationError(f"A criterion named {candidate!r} exists already; choose another name.")
        if not (isinstance(kind, type) and issubclass(kind, Criterion)):
            raise RegistrationError(f"{kind!r} is not a subclass of headprune.Criterion.")
        registered = kind if "__dataclass_fields__" in vars(kind) else dataclasses.dataclass(frozen=True)(kind)
        registered.name, registered.reference, registered.use = name, reference, use
        registered.schedule = schedule
        REGISTRY[name] = registered
        ALIASES.update(dict.fromkeys(aliases, name))
        return registered  # type: ignore[return-value]

    return register


def make(spec: str | Criterion, **options: Any) -> Criterion:
    """A criterion from its name, `inverse:` before it and options in brackets if wanted: "hies(alpha=0.7)"."""
    if isinstance(spec, Criterion):
        if options:
            raise CriterionError(f"{spec} is an instance, so pass {', '.join(options)} to its class.")
        return spec
    if not isinstance(spec, str):
        raise CriterionError(f"A criterion is a name such as 'gnorm', or an instance of one, not {spec!r:.60}.")
    text = spec.strip()
    if text.startswith(INVERSE):
        return Inverted(make(text.removeprefix(INVERSE), **options))
    match = SPEC.match(text)
    name = match["name"].strip() if match else text
    name = _current_name(name)
    if match is None or name not in REGISTRY:
        near = difflib.get_close_matches(name, REGISTRY, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(sorted(REGISTRY))}."
        if "+" in name or "@" in name:
            hint = "name one criterion here, its repair with --repair and its schedule with --schedule."
        raise CriterionError(f"There is no criterion {name!r}; {hint}")
    kind = REGISTRY[name]
    hints = get_type_hints(kind)
    for part in filter(None, (part.strip() for part in (match["options"] or "").split(","))):
        key, _, value = part.partition("=")
        options[key.strip()] = _parse(value.strip(), hints.get(key.strip()))
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for key in options:
        if key not in known:
            takes = f"takes {', '.join(known)}" if known else "takes no options"
            raise CriterionError(f"Criterion {name!r} has no option {key!r}; it {takes}.")
        _check_type(name, key, options[key], hints.get(key))
    made = kind(**options)  # which checks ranges
    for key, value in options.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise CriterionError(f"{key} of {name} must be a finite number, not {value}.")
    return made


def _current_name(name: str) -> str:
    if name in ALIASES:
        warn_renamed(f"Criterion {name!r}", repr(ALIASES[name]))
    return ALIASES.get(name, name)


def split_names(text: str) -> list[str]:
    """Names, separated by commas; a comma inside brackets belongs to the name."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def split_suffix(spec: str) -> tuple[str, str]:
    """A name and its suffixes, from the first @ or plus sign; those inside brackets belong to the name."""
    sign = re.search(r"[@+]", spec[(end := spec.rfind(")") + 1) :])
    return (spec, "") if sign is None else (spec[: end + sign.start()], spec[end + sign.start() :])


def split_suffixes(spec: str) -> tuple[str, str | None, str | None]:
    """A name, its schedule and its repair, as in "his@one-shot+lstsq"; None for each that it does not name."""
    name, suffix = split_suffix(spec)
    words: dict[str, str] = {}
    for sign, word in re.findall(r"([@+])([^@+]*)", suffix):
        if sign in words:
            noun = "repairs" if sign == "+" else "schedules"
            raise CriterionError(f"{spec!r} names two {noun}; leave one of them out.")
        words[sign] = word.strip()
    return name, words.get("@"), words.get("+")


def _check_type(name: str, key: str, value: Any, hint: Any) -> None:
    if hint in (int, float, bool, str):
        allowed = (int, float) if hint is float else hint
        if not isinstance(value, allowed) or (hint is not bool and isinstance(value, bool)):
            raise CriterionError(f"{key} of {name} must be a {hint.__name__}, not {value!r:.60}.")


def _parse(value: str, hint: Any) -> Any:
    try:
        if hint is bool:
            return {"true": True, "false": False}[value.lower()]
        return hint(value) if hint in (int, float) else value
    except (KeyError, ValueError):
        raise CriterionError(f"{value!r} is not a {hint.__name__}; write it like 3, 0.5 or true.") from None


def check_choice(criterion: Criterion, option: str, choices: Sequence[str]) -> None:
    value = getattr(criterion, option)
    if value not in choices:
        raise CriterionError(f"{option} of {criterion.name} must be one of {', '.join(choices)}, not {value!r}.")
