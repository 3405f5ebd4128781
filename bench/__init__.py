"""Measures the ops (``python -m bench``) and trains with them (``python -m bench.train``)."""

import warnings

# Every process that compiles warns that there is no NumPy, which torch does not need.
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
