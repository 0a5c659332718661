"""From the user's module to one graph: dynamo, what a call is known by, what is checked before every call."""
