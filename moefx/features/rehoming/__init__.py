"""Homes of experts that move every so many optimizer steps, by what calls have counted: Hecate, Algorithm 2."""
