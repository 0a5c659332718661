"""Blocks of the schedule S2 that come back in phases, each gathered while the next is on its way (Parm's SAA)."""
