"""One file for each engine; each runs in its engine's own environment, so all import little."""
