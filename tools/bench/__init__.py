"""Measure what calls, frames and sharing cost, each beside the same work by other means: ``python -m tools.bench``."""
