"""Whole sequences of recurrent cells on a GPU."""
