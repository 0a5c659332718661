"""What users look at: explain, inspect, timeline, profile, memory, plan, and a page that shows a run."""
