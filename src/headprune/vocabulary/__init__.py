"""Removes tokens that given texts do not need from a tokenizer and from every table of the model.

`needed_tokens.py` knows what texts need, `tokenizer_json.py` the JSON of tokenizers, `token_tables.py` finds what has a
row per token by building the class twice, `config_ids.py` the ids in configs."""
