"""What a program is made of: regions, users' code and leaves in their order, the slots between them, and what each step
does (:mod:`accumulate` writes ``.grad``). :mod:`compiled_autograd.runtime` runs the steps one after the other.
"""
