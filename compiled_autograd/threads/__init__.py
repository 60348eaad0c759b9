"""Which thread may do what: the gate to the engine, leaves that are being written, forks."""
