"""Layer-wise staleness."""
