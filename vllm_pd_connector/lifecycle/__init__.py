"""What state everything is in: transition tables, completion counters, deadlines. Pure; time is an argument."""
