"""Make of a graph what one of its calls needs, where only the call knows that."""
