"""What can be observed: counters, gauges, and each request's timeline."""
