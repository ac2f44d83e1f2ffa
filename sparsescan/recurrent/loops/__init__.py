"""Loops over the steps of recurrent cells."""
