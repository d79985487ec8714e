"""The claims of the three papers, and of this project, that can be tested: what `headprune claims` lists.

What their tests came to is in findings.json beside this file; `python -m benchmarks.claims` writes it from the result
files in benchmarks/results/claims.
"""

from __future__ import annotations

from headprune.papers.ledger import Claim

SIZES = "The parameters of the four configurations are counted before and after the removal of as many heads."
CURVES = "The authors' curve is compared with the median of their random trials, wherever both have a point."


def _compared(one: str, other: str, measure: str = "Accuracy") -> str:
    """The test of a claim that `one` is better, on the subjects of `headprune reproduce hies`."""
    return f"{measure} of {one} minus {other}, scored once, mean from 30 to 60 % of the heads removed."


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
        "As for the totals, module by module.",
        "85,054,464 to 62,028,864 for the encoder of BERT-base, and 25 more rows",
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
        "The rule of `--knee` on the authors' curves, against their numbers of removals. None of 85,064 pairs of a "
        "smoothing and a rule gives all four (`benchmarks/results/stop_rules.json`).",
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
        "Table 1, Table 3",
        "HIES is more accurate than HIS where 30 % of the heads or more are removed.",
        _compared("HIES", "HIS"),
        "85.20 against 84.47 % at 30 %, 81.43 against 79.50 % at 50 % (BERT-base, mean of GLUE)",
    ),
    Claim(
        "hies-stability",
        "hies",
        "Table 2",
        "Predictions of models pruned by HIES equal the dense model's more often than by HIS.",
        _compared("HIES", "HIS", "Agreement with the dense model"),
        "91.90 against 90.00 % at 30 %, 83.91 against 77.23 % at 50 % (BERT-base, mean of GLUE)",
    ),
    Claim(
        "hies-few-heads",
        "hies",
        "Section 5.3.1",
        "HIS is as good as HIES where up to 10 % of the heads are removed.",
        "The same at 10 %: HIS is at most one point behind, by the whole interval.",
        "86.42 and 86.50 % (BERT-base, mean of GLUE)",
    ),
    *(
        Claim(
            f"hies-above-{name.lower()}",
            "hies",
            "Table 1",
            f"HIES is more accurate than {title} where 30 % of the heads or more are removed.",
            _compared("HIES", name),
            f"85.20 against {at_30} % at 30 %, 81.43 against {at_50} % at 50 % (BERT-base, mean of GLUE)",
        )
        for name, title, at_30, at_50 in (
            ("random", "random removal", 79.59, 69.82),
            ("L2", "the norm of the weights", 66.88, 63.24),
            ("AD", "the deficit of attention entropy", 73.64, 66.44),
            ("LLM-Pruner", "LLM-Pruner's first-order importance", 81.12, 77.65),
        )
    ),
    Claim(
        "hies-above-ae",
        "hies",
        "Appendix D.8",
        "HIES is more accurate than attention entropy alone.",
        _compared("HIES", "AE"),
    ),
    Claim(
        "hies-complementary",
        "hies",
        "Section 4.2.4",
        "Importance and entropy are complementary evidence.",
        "Rank correlation of the two scores over all heads: below 0.71, so that neither explains half of the other.",
    ),
    Claim(
        "hies-alpha",
        "hies",
        "Appendix D.8",
        "A mixture of importance and entropy is better than entropy alone.",
        "Alpha of the largest weighted area on 96 validation samples: above 0 for every seed.",
    ),
    Claim(
        "hies-entropy-direction",
        "hies",
        "Section 4.2.2",
        "Heads with focused attention are worth keeping: removing spread-out heads first is better than the reverse.",
        _compared("AE", "AD"),
    ),
    Claim(
        "hies-above-gnorm",
        "hies",
        "not in the paper",
        "HIES is more accurate than Gnorm, both scored once.",
        _compared("HIES", "Gnorm"),
    ),
    Claim(
        "hies-dispersed",
        "hies",
        "Section 5.3.1, Figure 3",
        "HIES removes heads from all layers, HIS mainly from lower ones.",
        "Entropy of the distribution of removed heads over sites, from 30 to 60 %: difference by seed.",
    ),
    Claim(
        "hies-calibration",
        "hies",
        "Appendix D.3, Table 11",
        "32 calibration samples are enough for HIES.",
        "Accuracy with 32 against 384 samples, from 30 to 60 %, by seed: at most one point behind.",
        "80.35 to 80.53 % at 50 % over 1 to 1,024 samples (BERT-base, mean of GLUE)",
    ),
    Claim(
        "hies-orthogonal",
        "hies",
        "Lemma 4.3, Appendix D.1",
        "The gradients of HIS and of AE with respect to attention are orthogonal in expectation.",
        "Cosine of the two gradients at the attention probabilities of every head.",
        "",
        "gradients of both scores at the attention probabilities, which no criterion here reads",
    ),
    Claim(
        "hies-normalization",
        "hies",
        "Appendix B",
        "Entropies divided by the log of the length, and importances as means over tokens, are better than raw ones.",
        _compared("HIES", "HIES with raw signals"),
    ),
    Claim(
        "hies-large-models",
        "hies",
        "Tables 1-3, Figure 4",
        "HIES is better than its baselines on BERT, LLaMA, ViT and a vision-language model of published sizes.",
        "`headprune reproduce hies --model MODEL --data FILE` on these models.",
        "",
        "pretrained checkpoints from the hub, and an accelerator for the largest",
    ),
)

GATES = (
    Claim(
        "gates-sizes",
        "gates",
        "README of the authors' code",
        "The All-attention Transformer has 53.8 M parameters, and 30.7 M without 43 % of its heads.",
        "The authors' configuration is counted with this project's class, and what their layers have besides.",
        "53.8 M and 30.7 M",
    ),
    Claim(
        "gates-all-attention",
        "gates",
        "Abstract",
        "Pruning heads of an All-attention Transformer costs less than pruning those of a Transformer.",
        "Loss that pruning to the same share of heads adds, against dense models trained for as long.",
        "30.7 M parameters match a Transformer-XL of 47.9 M",
    ),
    *(
        Claim(
            f"gates-{name}",
            "gates",
            "method",
            f"{title} makes pruning by gates better.",
            f"Loss with 60 % of the heads, with and without it ({name}).",
        )
        for name, title in (
            ("initial-value", "Starting with open gates"),
            ("warm-up", "A warm-up of the L0 loss"),
            ("rescaling", "Rescaling the outputs of a layer by the share of open heads"),
        )
    ),
    Claim(
        "gates-speed",
        "gates",
        "Abstract",
        "Models whose heads are removed are faster.",
        "Time of a forward pass against the dense model's, in turns in one run.",
    ),
    Claim(
        "gates-above-importance",
        "gates",
        "not in the paper",
        "Learned gates are better than removing heads by a criterion, with the same heads and steps of training.",
        "Loss, or sentences translated without an error, by gates against a criterion.",
    ),
    Claim(
        "gates-encoder-first",
        "gates",
        "arXiv 1905.09418",
        "In translation, self-attention of the encoder loses its heads first.",
        "A small encoder-decoder, targets of a half and a quarter, three seeds: where the fewest heads are kept.",
    ),
    Claim(
        "gates-cross-longest",
        "gates",
        "arXiv 1905.09418",
        "In translation, attention of the decoder to the encoder keeps its heads longest.",
        "Over the same targets and seeds, which type of attention keeps the most heads.",
    ),
    Claim(
        "gates-quality",
        "gates",
        "arXiv 1905.09418",
        "Most heads can be removed with a small loss of quality.",
        "Sentences translated without an error, against the dense model: at most one point behind.",
    ),
    Claim(
        "gates-wikitext",
        "gates",
        "Abstract",
        "On WikiText-103, models pruned by gates match larger ones of other kinds.",
        "A training of 16 layers on WikiText-103.",
        "perplexities of the paper's tables",
        "WikiText-103 and accelerators",
    ),
)

OURS = tuple(
    Claim(
        f"default-above-{name.lower()}",
        "headprune",
        "docs/criteria/index.md",
        f"The default criterion, without its repair, is more accurate than {title} where 30 % of the heads or more are "
        "removed.",
        _compared("the default criterion", name),
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

CLAIMS = (*GREEDY_GNORM, *HIES, *GATES, *OURS)
