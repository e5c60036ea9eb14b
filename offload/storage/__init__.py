"""Storage: files, the I/O engine, and the block store on top of them."""
