"""One backward: the engine or a graph of ours? What is handed over runs, and is accounted for."""
