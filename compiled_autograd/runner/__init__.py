"""The runner: unedited programs whose backwards run in a session. ``docs/internals/runner.md``."""
