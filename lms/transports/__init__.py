"""Move swapped bytes off the device and back: one module per way, all with the same interface."""
