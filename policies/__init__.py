"""The policies that ship with `offload`: pure code and presets, found by name."""
