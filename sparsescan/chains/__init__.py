"""Whatever a caller hands in: containers, chains that are checked once, chains on disk."""
