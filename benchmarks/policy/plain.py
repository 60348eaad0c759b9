"""Policies without a memory: what the others are compared with."""

from __future__ import annotations

from .sequence import Tape
from .simulator import Action, Happened, Way


class EagerOnly:
    """Every backward on eager."""

    def action(self, tape: Tape, now: float) -> Action:
        return Action(Way.EAGER)

    def missed(self, tape: Tape, now: float) -> Action:
        return Action(Way.EAGER)

    def told(self, tape: Tape, happened: Happened) -> None:
        pass

    def arrived(self, tape: Tape, seconds: float) -> None:
        pass


class Always(EagerOnly):
    """Everything that misses is compiled, and everything that is compiled is used."""

    def __init__(self, way: Way = Way.COMPILE) -> None:
        self._way = way

    def action(self, tape: Tape, now: float) -> Action:
        return Action(Way.SERVE)

    def missed(self, tape: Tape, now: float) -> Action:
        return Action(self._way)
