"""The question whether compiled backwards pay for one program: ``docs/internals/comparing.md``."""
