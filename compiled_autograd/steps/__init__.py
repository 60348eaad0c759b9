"""The parts of a program: regions, users' code and leaves in order, the slots between them, and the effect of each step
(:mod:`accumulate` writes ``.grad``). :mod:`compiled_autograd.runtime` runs the steps one after the other."""
