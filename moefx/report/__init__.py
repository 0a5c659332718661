"""What users look at: explain, inspect, timeline, profile, memory, plan."""
