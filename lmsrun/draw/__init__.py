"""Draw machines and plans: values to SVG, and SVG to PNG."""
