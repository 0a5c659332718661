"""A program for one kind of call: the list of passes, the runner that verifies after each, what ranks agree on."""
