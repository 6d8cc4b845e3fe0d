"""The compiled kernels of CPUs: what finds their builds, packs for them and calls them. Their C is in `source/`."""
