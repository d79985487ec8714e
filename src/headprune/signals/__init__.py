"""What is measured for criteria in one instrumented forward pass per batch, and the backward passes they request.

A file per signal: a request, and the meter that answers it with sums over samples; `tokens.py` gathers the tokens of
sites under a memory limit."""

from headprune.signals.attribution import Attribution
from headprune.signals.block_norms import BlockNorms
from headprune.signals.entropy import Entropy, EntropyDeficit, ZeroProbabilities
from headprune.signals.gate_gradients import GateGradients
from headprune.signals.norms import OutputNorms, WeightNorms, weight_norms
from headprune.signals.observe import Observation, observe
from headprune.signals.spec import Aggregation, Meter, Objective, Request, SiteRequest, View
from headprune.signals.tokens import TokenRequest, Tokens
from headprune.signals.weight_products import WeightProducts

__all__ = [
    "Aggregation",
    "Attribution",
    "BlockNorms",
    "Entropy",
    "EntropyDeficit",
    "GateGradients",
    "Meter",
    "Objective",
    "Observation",
    "OutputNorms",
    "Request",
    "SiteRequest",
    "TokenRequest",
    "Tokens",
    "View",
    "WeightNorms",
    "WeightProducts",
    "ZeroProbabilities",
    "observe",
    "weight_norms",
]
