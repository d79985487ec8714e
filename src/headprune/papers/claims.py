"""The claims of the three papers, and of this project, that can be tested: what `headprune claims` lists.

What their tests came to is in findings.json beside this file; `python -m benchmarks.claims` writes it from the result
files in benchmarks/results/claims.
"""

from __future__ import annotations

from headprune.papers.ledger import Claim

SIZES = "The parameters of the four configurations are counted before and after the removal of as many heads."
CURVES = "The authors' curve is compared with the median of their random trials, wherever both have a point."
ON_SUBJECTS = (
    "Scored once on 32 samples, five seeds, nothing refitted; difference per sample from 30 to 60 % of the heads "
    "removed, with a 95 % interval over samples and seeds."
)
HUB = "the four checkpoints and data sets of the paper, from the hub"

GREEDY_GNORM = (
    Claim(
        "gnorm-sizes",
        "greedy-gnorm",
        "Table 1",
        "Parameters and megabytes of four models before and after pruning are those printed.",
        SIZES,
        "102,269,955 to 79,244,355 parameters for BERT-base, and three more models",
    ),
    Claim(
        "gnorm-module-sizes",
        "greedy-gnorm",
        "Tables 2-5",
        "Parameters of embeddings, encoder, pooler and classifier are those printed.",
        SIZES,
        "85,054,464 to 62,028,864 for the encoder of BERT-base, and 14 more rows",
    ),
    Claim(
        "gnorm-final-masks",
        "greedy-gnorm",
        "Figure 5",
        "The heads that are kept are those that remain after the published number of removals in the published order.",
        "The first 117, 3, 245 and 105 entries of the orders are compared with the masks.",
        "27 of 144, 9 of 12, 139 of 384 and 39 of 144 heads",
    ),
    Claim(
        "gnorm-accuracies",
        "greedy-gnorm",
        "Table 1",
        "Accuracies after pruning are those of the curves at the number of heads removed.",
        "The curve of each model is read at the number of removals of Table 1.",
        "90.08, 77.76, 86.40 and 90.97 %",
    ),
    Claim(
        "gnorm-stop",
        "greedy-gnorm",
        "experiments",
        "Pruning stops at the inflection point of the curve.",
        "`--knee` is applied to the authors' curves, and compared with the number of heads they removed.",
        "117, 36, 245 and 105 removals",
    ),
    Claim(
        "gnorm-above-random",
        "greedy-gnorm",
        "Figure 4",
        "Greedy-Gnorm is more accurate than heads removed at random.",
        CURVES,
    ),
    Claim(
        "gnorm-above-entropy",
        "greedy-gnorm",
        "Figure 3",
        "Greedy-Gnorm is more accurate than removal by attention entropy, in either order.",
        "Areas under the authors' curves are compared.",
    ),
    Claim(
        "gnorm-direction",
        "greedy-gnorm",
        "Figure 3",
        "Removing the heads with the largest Gnorm first is worse than with the smallest.",
        "Areas under the authors' curves of Greedy-Gnorm and its inverse are compared.",
    ),
    Claim(
        "gnorm-near-original",
        "greedy-gnorm",
        "experiments",
        "RoBERTa-large stays near its accuracy with 70 % of its heads removed.",
        "The authors' curve is read at 70 % of 384 heads.",
        "0.878 dense",
    ),
    Claim(
        "gnorm-greedy-above-static",
        "greedy-gnorm",
        "method",
        "Scoring again after every removal is better than scoring once.",
        "Both schedules on the same samples, three seeds: difference of the area under the curve.",
    ),
    Claim(
        "gnorm-gradients-change",
        "greedy-gnorm",
        "Figure 2",
        "Removing one head changes the gradients of the others, so that scores have to be taken again.",
        "Norm of the change of the Q, K and V gradients when the least important head is gated: more than 1 % at every "
        "other site.",
    ),
    Claim(
        "gnorm-greedy-above-random",
        "greedy-gnorm",
        "Figure 4",
        "Greedy-Gnorm is better than heads removed at random, on models that the authors did not use.",
        "Both on the same samples, three seeds: difference of the area under the curve.",
    ),
    Claim(
        "gnorm-objective",
        "greedy-gnorm",
        "method",
        "The norm of the logits is a better objective than the task loss.",
        "Both objectives, scored once, three seeds: difference of the area under the curve.",
    ),
    Claim(
        "gnorm-aggregation",
        "greedy-gnorm",
        "Eq. 13-16",
        "The mean over samples of norms per sample is a better score than the norm of a batch's gradient, which the "
        "notebooks compute.",
        "Both, scored once, three seeds: difference of the area under the curve.",
    ),
    Claim(
        "entropy-epsilon-order",
        "greedy-gnorm",
        "Appendix C.1",
        "The epsilon-rectified entropies keep the order of heads.",
        "Orders by variants A, B and C and several epsilons on real attention; differences against the bound.",
    ),
    Claim(
        "entropy-underflow",
        "greedy-gnorm",
        "Appendix C",
        "Without epsilon, probabilities that underflow make entropies undefined.",
        "Rows with zero probabilities are counted, as a plain logarithm of zero would be infinite.",
    ),
    Claim(
        "gnorm-accuracy-measured",
        "greedy-gnorm",
        "Table 1",
        "BERT-base keeps 90.08 % of 96.82 % without 117 of 144 heads, and three more models.",
        "The runs of `headprune reproduce greedy-gnorm` on the authors' checkpoints.",
        "96.82 to 90.08, 84.48 to 77.76, 87.80 to 86.40, 99.73 to 90.97 %",
        HUB,
    ),
)

HIES = (
    Claim(
        "hies-quality",
        "hies",
        "Abstract",
        "HIES is more accurate than HIS where 30 % of the heads or more are removed.",
        ON_SUBJECTS,
        "up to 15.2 % better",
    ),
    Claim(
        "hies-stability",
        "hies",
        "Abstract",
        "Predictions of models pruned by HIES equal the dense model's more often than by HIS.",
        ON_SUBJECTS,
        "2.04 times as stable",
    ),
    Claim(
        "hies-few-heads",
        "hies",
        "experiments",
        "HIS is as good as HIES where up to 10 % of the heads are removed.",
        "The same at 10 %: HIS is at most one point behind, by the whole interval.",
    ),
    *(
        Claim(
            f"hies-above-{name.lower()}",
            "hies",
            "experiments",
            f"HIES is more accurate than {title} where 30 % of the heads or more are removed.",
            ON_SUBJECTS,
        )
        for name, title in (
            ("random", "random removal"),
            ("L2", "the norm of the weights"),
            ("AD", "the deficit of attention entropy"),
            ("LLM-Pruner", "LLM-Pruner's first-order importance"),
        )
    ),
    Claim(
        "hies-above-ae",
        "hies",
        "method",
        "HIES is more accurate than attention entropy alone.",
        ON_SUBJECTS,
    ),
    Claim(
        "hies-complementary",
        "hies",
        "method",
        "Importance and entropy are complementary evidence.",
        "Rank correlation of the two scores over all heads: below 0.71, so that neither explains half of the other.",
    ),
    Claim(
        "hies-alpha",
        "hies",
        "method",
        "A mixture of importance and entropy is better than entropy alone.",
        "Alpha of the largest weighted area on 96 validation samples, five seeds: above 0 each time.",
    ),
    Claim(
        "hies-entropy-direction",
        "hies",
        "method",
        "Heads with focused attention are worth keeping: removing spread-out heads first is better than the reverse.",
        ON_SUBJECTS.replace("difference", "difference of AE and AD"),
    ),
    Claim(
        "hies-above-gnorm",
        "hies",
        "not in the paper",
        "HIES is more accurate than Gnorm, both scored once.",
        ON_SUBJECTS,
    ),
    Claim(
        "hies-normalization",
        "hies",
        "Appendix B",
        "Entropies divided by the log of the length, and importances as means over tokens, are better than raw ones.",
        ON_SUBJECTS,
    ),
    Claim(
        "hies-large-models",
        "hies",
        "experiments",
        "HIES is better than its baselines on BERT, LLaMA, ViT and a vision-language model of published sizes.",
        "`headprune reproduce hies --model MODEL --data FILE` on these models.",
        "",
        "pretrained checkpoints from the hub, and an accelerator for the largest",
    ),
)

OURS = tuple(
    Claim(
        f"default-above-{name.lower()}",
        "headprune",
        "docs/criteria/index.md",
        f"The default criterion, without its repair, is more accurate than {title} where 30 % of the heads or more are "
        "removed.",
        ON_SUBJECTS,
    )
    for name, title in (
        ("HIES", "HIES"),
        ("HIS", "HIS"),
        ("Gnorm", "Gnorm scored once"),
        ("LLM-Pruner", "LLM-Pruner's first-order importance"),
        ("L2", "the norm of the weights"),
        ("AE", "attention entropy"),
        ("AD", "the deficit of attention entropy"),
        ("random", "random removal"),
    )
)

CLAIMS = (*GREEDY_GNORM, *HIES, *OURS)
