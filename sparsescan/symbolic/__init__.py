"""A scan without values: patterns, schedules, and the programs that follow from both."""
