"""A value of `formula`."""

VALUES = {"formula": {"tutel": "r"}}
