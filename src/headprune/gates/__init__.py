"""Gates that learn which units a model can do without, while it trains."""
