"""The disk below a pool node's memory: blocks in extents of files, and a journal that says which extent holds what."""
