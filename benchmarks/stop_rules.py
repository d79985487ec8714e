"""Looks for a rule that stops where the Greedy-Gnorm paper does: 117, 36, 245 and 105 heads on the authors' curves.

    python -m benchmarks.stop_rules FOLDER            writes benchmarks/results/stop_rules.json

FOLDER has the authors' csv files. Every rule reads a curve after every smoothing of it. Four numbers are few: of
thousands of rules some would agree with them by chance, so one that does must be principled as well.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from scipy.ndimage import gaussian_filter1d, median_filter, uniform_filter1d
from scipy.optimize import curve_fit
from scipy.signal import savgol_filter
from sklearn.isotonic import IsotonicRegression

from headprune.papers.paper_models import MODELS
from headprune.papers.published import read_curve

RESULTS = Path(__file__).parent / "results" / "stop_rules.json"
Curve = np.ndarray
Smoothing = Callable[[Curve], Curve]
Rule = Callable[[Curve], int]  # the place on the curve


def smoothings() -> Iterator[tuple[str, Smoothing]]:
    yield "none", lambda y: y
    for width in (3, 5, 7, 9, 11, 15, 21, 25, 31):
        yield f"mean of {width}", lambda y, w=width: uniform_filter1d(y, w, mode="nearest")
        yield f"median of {width}", lambda y, w=width: median_filter(y, w, mode="nearest")
    for width in (0.5, 1, 1.5, 2, 3, 4, 5, 6, 8, 10):
        yield f"Gaussian of {width}", lambda y, w=width: gaussian_filter1d(y, w, mode="nearest")
    for width in (5, 7, 9, 11, 15, 21, 31):
        for degree in (2, 3):
            yield (
                f"Savitzky-Golay of {width}, degree {degree}",
                lambda y, w=width, d=degree: savgol_filter(y, min(w, len(y) - 1 + len(y) % 2), d),
            )
    for degree in range(3, 8):
        yield f"polynomial of degree {degree}", lambda y, d=degree: polynomial(y, d)
    yield "isotonic", lambda y: IsotonicRegression(increasing=False).fit_transform(np.arange(len(y)), y)


def polynomial(y: Curve, degree: int) -> Curve:
    x = np.linspace(0, 1, len(y))
    return np.polyval(np.polyfit(x, y, degree), x)


def last_in_first_run(good: np.ndarray) -> int:
    """The last place before the first that is not good."""
    bad = np.nonzero(~good)[0]
    return int(bad[0]) - 1 if len(bad) else len(good) - 1


def bends(y: Curve, reach: int) -> Curve:
    """Second differences over `reach` places on either side, from place `reach` on."""
    return y[2 * reach :] - 2 * y[reach:-reach] + y[: -2 * reach]


def curvature(y: Curve) -> Curve:
    x = np.linspace(0, 1, len(y))
    slope = np.gradient(y, x)
    return np.gradient(slope, x) / (1 + slope**2) ** 1.5


def span(y: Curve) -> Curve:
    return (y - y.min()) / (y.max() - y.min())


def shares(y: Curve) -> Curve:
    return np.linspace(0, 1, len(y))


def rules() -> Iterator[tuple[str, str, Rule]]:
    """(family, name, rule)."""
    yield "largest drop", "before the largest drop", lambda y: int(np.argmin(np.diff(y)))
    yield "largest drop", "after the largest drop", lambda y: int(np.argmin(np.diff(y))) + 1
    yield "second difference", "smallest", lambda y: int(np.argmin(bends(y, 1))) + 1
    yield "second difference", "largest", lambda y: int(np.argmax(bends(y, 1))) + 1
    yield (
        "second difference",
        "last change of sign",
        lambda y: int(np.nonzero(np.diff(np.sign(bends(y, 1))))[0][-1]) + 1,
    )
    yield "curvature", "smallest", lambda y: int(np.argmin(curvature(y)))
    yield "curvature", "largest absolute", lambda y: int(np.argmax(abs(curvature(y))))
    yield "Kneedle", "span of the curve", lambda y: int(np.argmax(span(y) + shares(y)))
    yield "Kneedle", "dense to last", lambda y: int(np.argmax((y - y[-1]) / (y[0] - y[-1]) + shares(y)))
    for weight in np.arange(0.05, 5, 0.05):
        yield (
            "weighted sum",
            f"accuracy / dense + {weight:.2f} * share removed",
            lambda y, w=weight: int(np.argmax(y / y[0] + w * shares(y))),
        )
        yield (
            "weighted sum",
            f"accuracy in its span + {weight:.2f} * share removed",
            lambda y, w=weight: int(np.argmax(span(y) + w * shares(y))),
        )
    for limit in np.arange(0.002, 0.3, 0.001):
        yield "drop", f"last within {limit:.3f}", lambda y, t=limit: int(np.nonzero(y >= y[0] - t)[0][-1])
        yield "drop", f"first run within {limit:.3f}", lambda y, t=limit: last_in_first_run(y >= y[0] - t)
        yield (
            "drop",
            f"last within {limit:.3f} of dense",
            lambda y, t=limit: int(np.nonzero(y >= y[0] * (1 - t))[0][-1]),
        )
        yield (
            "drop",
            f"first run within {limit:.3f} of dense",
            lambda y, t=limit: last_in_first_run(y >= y[0] * (1 - t)),
        )
    for limit in np.arange(0.0005, 0.08, 0.0005):
        yield "slope", f"first step of {limit:.4f}", lambda y, t=limit: last_in_first_run(-np.diff(y) <= t) + 1
    for limit in np.arange(0.1, 8, 0.1):
        yield (
            "slope",
            f"first of {limit:.1f} times the mean slope",
            lambda y, t=limit: last_in_first_run(-np.diff(y) * (len(y) - 1) <= t * (y[0] - y[-1])) + 1,
        )
        yield (
            "slope",
            f"first of {limit:.1f} per share removed",
            lambda y, t=limit: last_in_first_run(-np.diff(y) * (len(y) - 1) <= t) + 1,
        )
    for part in (2, 3, 5, 10, 15, 20, 25, 30, 40):
        reach = lambda y, k=part: max(1, round(k * len(y) / 145))  # noqa: E731
        yield (
            "largest drop",
            f"in the next {part} of 145 steps",
            lambda y, r=reach: int(np.argmin(y[r(y) :] - y[: -r(y)])),
        )
        yield "second difference", f"over {part} of 145 steps", lambda y, r=reach: r(y) + int(np.argmin(bends(y, r(y))))
    yield "two lines", "least squares", two_lines
    yield "logistic", "midpoint", logistic


def two_lines(y: Curve) -> int:
    x = np.arange(len(y))
    errors = {}
    for place in range(2, len(y) - 2):
        fits = [(part, np.polyfit(x[part], y[part], 1)) for part in (slice(0, place + 1), slice(place, None))]
        errors[place] = sum(((np.polyval(line, x[part]) - y[part]) ** 2).sum() for part, line in fits)
    return min(errors, key=errors.__getitem__)


def logistic(y: Curve) -> int:
    start = [y[0], y[0] - y[-1], 0.8, 20]
    (_, _, middle, _), _ = curve_fit(
        lambda x, a, b, c, k: a - b / (1 + np.exp(-k * (x - c))), shares(y), y, p0=start, maxfev=20_000
    )
    return round(middle * (len(y) - 1))


def search(folder: Path) -> dict:
    curves = [np.array(read_curve(folder, model, "gnorm")) for model in MODELS]
    published = [model.removed * model.applications for model in MODELS]
    tried, best, exact, close = 0, {}, dict.fromkeys(range(5), 0), []
    for family, name, rule in rules():
        for smoothing, smooth in smoothings():
            places = []
            for curve in curves:
                try:
                    place = rule(smooth(curve[:, 1]))
                except (RuntimeError, IndexError, ValueError, np.linalg.LinAlgError):  # no fit, or no such place
                    place = 0
                places.append(int(curve[min(max(place, 0), len(curve) - 1), 0]))
            tried += 1
            equal = sum(one == other for one, other in zip(places, published, strict=True))
            exact[equal] += 1
            found = {"rule": name, "smoothing": smoothing, "stops": places, "equal": equal}
            close += [found] if equal > 2 else []
            gap = max(
                abs(one - other) / curve[-1, 0] for one, other, curve in zip(places, published, curves, strict=True)
            )
            if family not in best or (equal, -gap) > best[family][0]:
                best[family] = ((equal, -gap), found)
    return {
        "published": published,
        "tried": tried,
        "tried_by_stops_that_are_equal": exact,
        "at_least_three_equal": close,
        "best_by_family": {family: entry for family, (_, entry) in best.items()},
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    result = search(Path(sys.argv[1]))
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
