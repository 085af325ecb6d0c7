"""TPUs, and any other device of PJRT, through torch_xla."""
