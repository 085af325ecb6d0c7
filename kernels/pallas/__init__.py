"""Kernels for TPUs in Pallas, and the same work in plain XLA. Importing this imports no jax."""
