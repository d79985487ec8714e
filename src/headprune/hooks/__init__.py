"""Everything attached to a model while it runs and detached afterwards; the only room that registers hooks.

Gates, attention probabilities, the layer cache, logits in blocks, the residual stream, offloaded weights; `attach.py`
registers."""
