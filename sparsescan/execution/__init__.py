"""What a program needs to run: memory, tables, threads, launches."""
