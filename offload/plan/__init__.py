"""What a run will need and how fast it can be. Pure: no torch, no I/O, no clock."""
