"""Programs that show the library at work, built on its public names."""
