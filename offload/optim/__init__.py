"""Optimizers over streamed state: kernels, codecs, gradients, the update."""
