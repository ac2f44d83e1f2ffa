"""Plans: made once, run many times, printed, drawn and saved."""
