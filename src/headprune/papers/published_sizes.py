"""Tables 2 to 5 of arXiv 2602.04491 as printed, and whether the sizes that are counted here equal them."""

from __future__ import annotations

from typing import Any

from headprune.papers.paper_models import MODELS
from headprune.papers.tables import make_tables

Row = tuple[str, tuple[int, float, float], tuple[int, float, float]]
# Model -> its rows: module, and before and after pruning the parameters, their share in % and MB.
PUBLISHED: dict[str, list[Row]] = {
    "bert": [
        ("model", (102_269_955, 100.00, 390.13), (79_244_355, 100.00, 302.29)),
        ("bert", (102_267_648, 100.00, 390.12), (79_242_048, 100.00, 302.28)),
        ("embeddings", (16_622_592, 16.25, 63.41), (16_622_592, 20.98, 63.41)),
        ("encoder", (85_054_464, 83.17, 324.46), (62_028_864, 78.28, 236.62)),
        ("pooler", (590_592, 0.58, 2.25), (590_592, 0.75, 2.25)),
        ("classifier", (2_307, 0.00, 0.01), (2_307, 0.00, 0.01)),
        ("classifier.weight", (2_304, 0.00, 0.01), (2_304, 0.00, 0.01)),
        ("classifier.bias", (3, 0.00, 0.00), (3, 0.00, 0.00)),
    ],
    "albert": [
        ("model", (11_685_891, 100.00, 44.58), (11_095_491, 100.00, 42.33)),
        ("albert", (11_683_584, 99.98, 44.57), (11_093_184, 99.98, 42.32)),
        ("embeddings", (3_906_048, 33.43, 14.90), (3_906_048, 35.20, 14.90)),
        ("encoder", (7_186_944, 61.50, 27.42), (6_596_544, 59.45, 25.16)),
        ("pooler", (590_592, 5.05, 2.25), (590_592, 5.32, 2.25)),
        ("classifier", (2_307, 0.02, 0.01), (2_307, 0.02, 0.01)),
        ("classifier.weight", (2_304, 0.02, 0.01), (2_304, 0.02, 0.01)),
        ("classifier.bias", (3, 0.00, 0.00), (3, 0.00, 0.00)),
    ],
    "roberta": [
        ("model", (355_361_794, 100.00, 1355.60), (291_089_474, 100.00, 1110.42)),
        ("roberta", (354_310_144, 99.70, 1351.59), (290_037_824, 99.64, 1106.41)),
        ("embeddings", (52_000_768, 14.63, 198.37), (52_000_768, 17.86, 198.37)),
        ("encoder", (302_309_376, 85.07, 1153.22), (238_037_056, 81.77, 908.04)),
        ("classifier", (1_051_650, 0.30, 4.01), (1_051_650, 0.36, 4.01)),
        ("classifier.dense", (1_049_600, 0.30, 4.00), (1_049_600, 0.36, 4.00)),
        ("classifier.out_proj", (2_050, 0.00, 0.01), (2_050, 0.00, 0.01)),
    ],
    "xlm-roberta": [
        ("model", (278_059_028, 100.00, 1060.71), (257_395_028, 100.00, 981.88)),
        ("roberta", (277_453_056, 99.78, 1058.40), (256_789_056, 99.76, 979.57)),
        ("embeddings", (192_398_592, 69.19, 733.94), (192_398_592, 74.75, 733.94)),
        ("encoder", (85_054_464, 30.59, 324.46), (64_390_464, 25.02, 245.63)),
        ("classifier", (605_972, 0.22, 2.31), (605_972, 0.24, 2.31)),
        ("classifier.dense", (590_592, 0.21, 2.25), (590_592, 0.23, 2.25)),
        ("classifier.out_proj", (15_380, 0.01, 0.06), (15_380, 0.01, 0.06)),
    ],
}


def compare_sizes() -> dict[str, Any]:
    """Every printed row beside the counted one, to the decimals that are printed."""
    models = []
    for model, table in zip(MODELS, make_tables()[1:], strict=True):
        rows = []
        for counted, (name, before, after) in zip(table.rows, PUBLISHED[model.key], strict=True):
            part, count, share, count_after, share_after, _, size, size_after = counted
            numbers = ((count, share, size), (count_after, share_after, size_after))
            shown = [[number if isinstance(number, int) else round(float(number or 0), 2) for number in row]
                     for row in numbers]  # fmt: skip
            published = [list(before), list(after)]
            rows.append({"part": name, "counted": shown if part == name else [], "published": published})
        models.append({"title": model.title, "removed": model.removed, "rows": rows})
    return {"command": "headprune reproduce greedy-gnorm --out DIR", "models": models}
