"""Times the ops and measures their memory: ``python -m bench``."""
