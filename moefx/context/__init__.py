"""What passes are given and what they decide: mesh, options, decisions, facts of regions, the graphs of a step."""
