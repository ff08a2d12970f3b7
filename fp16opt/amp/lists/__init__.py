"""Which functions cast their inputs under O1, and to what. Lists may be added to before ``initialize``."""
