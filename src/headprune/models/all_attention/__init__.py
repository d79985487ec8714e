"""The All-attention Transformer (Sukhbaatar et al. 2019, arXiv 1907.01470)."""
