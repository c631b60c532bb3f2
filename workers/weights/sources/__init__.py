"""Places that weights come from, behind one port: `open_range` of a file, from an offset on."""
