"""Global variables, and functions that read them, of a file that is not that of a model's forward."""

from __future__ import annotations


class Box:
    number = 1.0


NUMBER, BOX, NUMBERS = 1.0, Box(), [1.0]


def one() -> float:
    return 1.0


def number() -> float:
    return NUMBER


def boxed() -> float:
    return BOX.number


def listed() -> float:
    return NUMBERS[0]


def called() -> float:
    return one()


def reset() -> None:
    global NUMBER, one
    NUMBER = BOX.number = NUMBERS[0] = 1.0
    one = _one


_one = one
