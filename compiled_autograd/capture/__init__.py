"""A live tape to a tape graph; and how a tape is read from Python."""
