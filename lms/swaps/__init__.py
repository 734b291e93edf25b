"""Choose what a step swaps so that its tensors take so many bytes: the policies."""
