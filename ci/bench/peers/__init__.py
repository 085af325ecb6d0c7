"""Octavo beside other engines on the same CPU: what is run, where, and what comes of it."""
