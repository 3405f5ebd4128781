"""Measures the ops (``python -m bench``) and trains with them (``python -m bench.train``)."""

import warnings

# Without NumPy, which torch does not need, every process that compiles warns.
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
