"""A smaller vocabulary: the tokens of given texts, in the tokenizer and in every table of the model."""
