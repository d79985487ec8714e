"""Python code shown to users in pages, model cards and exported folders: how to run a checkpoint or an export."""
