"""Draw what is known as SVG, and put it into one HTML file: pure, values in and text out."""
