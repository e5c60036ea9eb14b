"""Conformance classes and emulated faults for implementers of the interfaces of `offload`."""
