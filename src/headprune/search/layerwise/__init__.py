"""Layer after layer, front to back: each is there by itself, is pruned and repaired on what has gone through everything
pruned before it, and is put away before the next."""
