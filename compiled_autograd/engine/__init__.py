"""One backward: decides between the engine and a compiled graph, runs a handed-over tape, and accounts for it."""
