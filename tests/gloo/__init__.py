"""Tests that run two to four gloo processes on this machine."""
