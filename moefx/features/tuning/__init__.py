"""Choices that follow batch sizes while a model trains: predicted, or measured in real steps."""
