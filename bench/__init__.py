"""Measures the ops (``python -m bench``) and trains with them (``python -m bench.train``)."""

import warnings

# torch says so in every process that compiles, and works without NumPy.
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
