"""Kedge's Triton kernels, and the choice of whether a device runs them."""
