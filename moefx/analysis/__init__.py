"""What is found out about a graph before it is changed."""
