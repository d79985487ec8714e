"""Models to and from disk, and writing that a kill cannot spoil."""
