"""The benchmarks behind `offload bench`."""
