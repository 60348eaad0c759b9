"""Random tapes, run on the eager engine and compiled, and compared in everything that a program could observe.

``python -m tests.fuzz --help`` says how to run many, and how to run one again. From a seed to a verdict: ``generate``
draws a :class:`program.Program`, ``execute`` runs one step of it (``operators*``, ``functions``, ``hooks``, ``values``
are what it is made of; ``backward`` has the ways to ask for gradients), ``compare`` says how two runs differ,
``runner`` runs a program in all the ways that matter, ``shrink`` makes one that fails smaller.
"""
