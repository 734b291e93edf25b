"""Follow the calls of training steps: what they know, which plan they run, and what becomes of them."""
