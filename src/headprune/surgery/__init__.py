"""Units out of the weights. Nothing here knows any data but the one batch that a removal is verified on."""
