"""A stand-in for Intel's package: the documented names and signatures, computed on the CPU."""
