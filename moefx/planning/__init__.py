"""What is chosen where a machine is given: candidates of every region, their price, what is kept, and why."""
