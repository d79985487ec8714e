"""Everything that is attached to a model while it runs, and always comes off again."""
