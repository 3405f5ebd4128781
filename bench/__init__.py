"""Measures the ops (``python -m bench``) and trains with them (``python -m bench.train``)."""
