"""What reuse depends on: sizes and symbols, the state of the process."""
