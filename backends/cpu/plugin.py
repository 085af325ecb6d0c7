"""Entry point of the CPU backend. Imports no torch."""
