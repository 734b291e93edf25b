"""How a step is cut to size: one module a policy, each from a schedule to trips."""
