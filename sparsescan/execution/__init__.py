"""Everything that a program runs in: memory, tables, threads, launches."""
