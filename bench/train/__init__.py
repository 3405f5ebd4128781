"""The training job: ``python -m bench.train``."""
