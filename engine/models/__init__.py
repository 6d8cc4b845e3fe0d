"""Models: the decoder of the native families, the bridge to those of transformers, and checkpoints."""
