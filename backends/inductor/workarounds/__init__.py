"""Workarounds for faults of Inductor.

Each is for the versions that it names (:mod:`backends.versions`). ``tests/test_workarounds.py`` fails where a version
does not need one.
"""
