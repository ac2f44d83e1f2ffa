"""What a caller passes: containers, chains that are checked once, and chains on disk."""
