"""Where swapped bytes go: one small module per way, all answering the same two questions of the rewriter."""
